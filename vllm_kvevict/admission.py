"""Refuse a request's bad settings where it arrives: in the API server, or in ``LLM``.

The engine core runs in another process, where a refusal would come too late for the client.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.utils import length_from_prompt_token_ids_or_embeds

from vllm_kvevict.config import KEY, EvictionConfig
from vllm_kvevict.requests import asks, parse_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WRAPPED = "_kv_eviction_wrapped"


def check_request(vllm_config: "VllmConfig", params: Any, tokens: Any, embeds: Any) -> None:
    """Check the settings that a request brings in ``extra_args``.

    Args:
        vllm_config: Of the engine; without KV eviction every request passes.
        params: Sampling or pooling parameters.
        tokens: Token ids of the prompt, or None.
        embeds: [T, D] embeddings of the prompt, or None.

    Raises:
        ValueError: In one sentence, which key is wrong and what it may be.

    """
    extra_args = getattr(params, "extra_args", None)
    if not asks(extra_args):
        return
    config = EvictionConfig.parse(vllm_config.additional_config.get(KEY))
    if config is None or (tokens is None and embeds is None):
        return
    length = length_from_prompt_token_ids_or_embeds(tokens, embeds)
    parse_options(config, extra_args, length, vllm_config.cache_config.block_size)


def install() -> None:
    """Check every request of this process. Idempotent.

    ``InputProcessor.process_inputs`` sees each of them. ``AsyncLLM.generate`` is asked before a
    streamed answer has begun, so that it can still be HTTP 400.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    if hasattr(InputProcessor.process_inputs, _WRAPPED):
        return
    process_inputs, generate = (
        _wrap_process_inputs(InputProcessor.process_inputs),
        _wrap_generate(AsyncLLM.generate),
    )
    InputProcessor.process_inputs = process_inputs
    AsyncLLM.generate = generate


def _wrap_process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        check_request(
            self.vllm_config,
            request.sampling_params,
            request.prompt_token_ids,
            request.prompt_embeds,
        )
        return request

    setattr(process_inputs, _WRAPPED, True)
    return process_inputs


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def generate(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(prompt, dict):
            check_request(
                self.vllm_config,
                sampling_params,
                prompt.get("prompt_token_ids"),
                prompt.get("prompt_embeds"),
            )
        return original(self, prompt, sampling_params, *args, **kwargs)

    setattr(generate, _WRAPPED, True)
    return generate

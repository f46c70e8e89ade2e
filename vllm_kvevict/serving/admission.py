"""Refuse a request's bad settings where it arrives: in the API server, or in ``LLM``.

The engine core runs in another process, where a refusal would come too late for the client.
"""

import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.logger import init_logger
from vllm.utils import length_from_prompt_token_ids_or_embeds

from vllm_kvevict.config.connectors import NIXL, connector_names
from vllm_kvevict.config.handover import PARAMS, hands_over, one_token, shares_prompt
from vllm_kvevict.config.limits import check_limits
from vllm_kvevict.config.names import CONFIG_KEY, NONE, REPLAY, is_replay
from vllm_kvevict.config.requests import (
    AT,
    EVERY,
    PREFILL_INTERVAL,
    RequestOptions,
    asks,
    parse_options,
)
from vllm_kvevict.serving import beam_search, context
from vllm_kvevict.serving.capacity import capacity, check_capacity
from vllm_kvevict.serving.rules import ServerRules, server_rules

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kv_eviction.admission")

_WRAPPED = "_kv_eviction_wrapped"
_API_SERVER = "vllm.entrypoints.launchers.api_server.entry"
"""Loaded in API servers only."""


def check_request(
    vllm_config: "VllmConfig", params: Any, tokens: Any, embeds: Any
) -> RequestOptions | None:
    """Check the settings that a request brings in ``extra_args``.

    Args:
        vllm_config: Of the engine; without KV eviction every request passes.
        params: Sampling or pooling parameters.
        tokens: Token ids of the prompt, or None.
        embeds: [T, D] embeddings of the prompt, or None.

    Returns:
        The settings; None where there are none, or nothing to check them against.

    Raises:
        ValueError: In one sentence, which key is wrong and what it may be.

    """
    extra_args = getattr(params, "extra_args", None)
    known = _asked(vllm_config, extra_args)
    if known is None or (tokens is None and embeds is None):
        return None
    config, rules = known
    length = length_from_prompt_token_ids_or_embeds(tokens, embeds)
    options = parse_options(config, extra_args, length, rules)
    moves = any(name in NIXL for name in connector_names(vllm_config.kv_transfer_config))
    if moves and hands_over((extra_args or {}).get(PARAMS)):
        if (max_tokens := getattr(params, "max_tokens", None)) != 1:
            raise ValueError(one_token(max_tokens))
        return RequestOptions(NONE)
    check_limits(options, drafts=vllm_config.speculative_config is not None)
    check_capacity(vllm_config, rules, options, length, getattr(params, "max_tokens", None))

    # Not at import: this module is loaded while vLLM still looks for its platform.
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingType

    stops = [options.at, options.own_rule(rules[0]).next_point(0)] if options.evicts else []
    clips = any(stop is not None and stop < length for stop in stops)
    stride = EVERY if options.evicts and options.own_rule(rules[0]).every else PREFILL_INTERVAL
    if clips and params.sampling_type is SamplingType.RANDOM_SEED and current_platform.is_cpu():
        raise ValueError(
            f"KV eviction: {AT if options.at else stride} and seed cannot be combined on "
            "vLLM's CPU build: its workers end when a seeded prompt is computed in parts; omit "
            "the seed, or set temperature 0"
        )
    return options


def _asked(vllm_config: "VllmConfig", extra_args: Mapping[str, Any] | None) -> ServerRules | None:
    """The server's settings where a request must be checked against them, else None."""
    settings = vllm_config.additional_config.get(CONFIG_KEY)
    stops = isinstance(settings, dict) and (
        settings.get("prefill_interval") or settings.get("every")
    )
    checked = stops or asks(extra_args) or shares_prompt(extra_args)
    return server_rules(vllm_config) if checked else None


def check_name(request_id: str) -> None:
    """Refuse a name that a request of the engine's own may have.

    vLLM adds random letters to every name unless it is told not to.

    Raises:
        ValueError: In one sentence, which names are taken.

    """
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION and is_replay(request_id):
        raise ValueError(
            f"KV eviction: request ids that end with {REPLAY} and a number are the engine's own "
            "while VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set; choose another one"
        )


def check_rendered(vllm_config: "VllmConfig", params: Any, prompt: Any) -> None:
    """Check a request if its prompt is rendered already; any other prompt passes.

    Raises:
        ValueError: As :func:`check_request`.

    """
    if isinstance(prompt, dict):
        tokens, embeds = prompt.get("prompt_token_ids"), prompt.get("prompt_embeds")
        check_request(vllm_config, params, tokens, embeds)


def refuse_session(vllm_config: "VllmConfig", params: Any) -> None:
    """Refuse settings for a session of streaming input: its prompt has no end to evict at.

    Raises:
        ValueError: The parameters bring any setting of ours, or the KV cache is too small for a
            session that is never evicted.

    """
    extra_args = getattr(params, "extra_args", None)
    known = _asked(vllm_config, extra_args)
    if known is None:
        return
    if asks(extra_args):
        raise ValueError(
            f"KV eviction: a session of streaming input is never evicted; omit {CONFIG_KEY}*"
        )
    if capacity(vllm_config, known.rules) is not None:
        raise ValueError(
            "KV eviction: a session of streaming input is never evicted, and the KV cache of this "
            "server need not hold one of the longest length; serve it without "
            "--kv-eviction-prefill-interval"
        )


def install() -> None:
    """Check every request of this process. Idempotent.

    ``InputProcessor.process_inputs`` sees each of them. The others are asked before a streamed
    answer has begun, so that it can still be HTTP 400: ``AsyncLLM.generate``, and in the
    Responses API, which calls that only then, ``_generate_with_builtin_tools``.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    if not hasattr(InputProcessor.process_inputs, _WRAPPED):
        process_inputs, generate = (
            _wrap_process_inputs(InputProcessor.process_inputs),
            _wrap_generate(AsyncLLM.generate),
        )
        InputProcessor.process_inputs = process_inputs
        AsyncLLM.generate = generate
    beam_search.install()
    if _API_SERVER in sys.modules:
        beam_search.install_online()
        context.install()
        _install_responses()


def _install_responses() -> None:
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    original = getattr(OpenAIServingResponses, "_generate_with_builtin_tools", None)
    if original is None:
        logger.warning("Streams of the Responses API are refused only after they have begun.")
    elif not hasattr(original, _WRAPPED):
        OpenAIServingResponses._generate_with_builtin_tools = _wrap_responses(original)


def _wrap_process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        check_name(request.request_id)
        if beam_search.mark(self.vllm_config, request):
            return request
        if request.resumable:
            refuse_session(self.vllm_config, request.sampling_params)
        given = request.prompt_token_ids, request.prompt_embeds
        check_request(self.vllm_config, request.sampling_params, *given)
        return request

    setattr(process_inputs, _WRAPPED, True)
    return process_inputs


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def generate(
        self: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(prompt, AsyncGenerator):
            refuse_session(self.vllm_config, sampling_params)
        check_name(request_id)
        check_rendered(self.vllm_config, sampling_params, prompt)
        return original(self, prompt, sampling_params, request_id, *args, **kwargs)

    setattr(generate, _WRAPPED, True)
    return generate


def _wrap_responses(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = getattr(self.engine_client, "vllm_config", None)
        if vllm_config is not None:
            params, prompt = kwargs.get("sampling_params"), kwargs.get("engine_input")
            check_rendered(vllm_config, params, prompt)
        return original(self, *args, **kwargs)

    setattr(generate, _WRAPPED, True)
    return generate

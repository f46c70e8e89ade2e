"""Beam search, which vLLM runs as requests of one token each: it takes no settings of ours, and
its requests are never evicted."""

import sys
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.config.requests import BEAM_SEARCH
from vllm_kvevict.serving.capacity import whole_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WRAPPED = "_kv_eviction_wrapped"
_OFFLINE = "vllm.entrypoints.generate.beam_search.offline"
_SPEECH = {
    "vllm.entrypoints.speech_to_text.transcription.protocol": "TranscriptionRequest",
    "vllm.entrypoints.speech_to_text.translation.protocol": "TranslationRequest",
}
"""Modules that API servers load for some models only."""

_under_way: ContextVar[bool] = ContextVar("kv_eviction_beam_search", default=False)
"""True if the requests that this task or thread adds belong to a beam search."""


def mark(vllm_config: "VllmConfig", request: Any) -> bool:
    """Mark a request of a beam search for the engine core, which does not evict it.

    Args:
        vllm_config: Of the engine, which evicts.
        request: vLLM's ``EngineCoreRequest``.

    Returns:
        Whether the request belongs to a beam search.

    Raises:
        ValueError: The KV cache need not hold its prompt as a whole.

    """
    if not _under_way.get():
        return False
    check_length(vllm_config, len(request.prompt_token_ids) + 1)
    params = request.sampling_params
    params.extra_args = {**(params.extra_args or {}), BEAM_SEARCH: True}
    return True


def check_length(vllm_config: "VllmConfig", length: int) -> None:
    """Refuse a beam search if the KV cache is too small for its sequences.

    Raises:
        ValueError: In one sentence, how many blocks it needs, and how many are sure.

    """
    if (found := whole_blocks(vllm_config, length)) is not None:
        needed, sure = found
        raise ValueError(
            f"KV eviction: beam search is never evicted; {length} tokens may need {needed} blocks "
            f"of the KV cache, and {sure} are sure; shorten the prompt or the answer, or ask "
            "without use_beam_search"
        )


def install() -> None:
    """Know beam searches in ``LLM``. Idempotent."""
    if (module := sys.modules.get(_OFFLINE)) is not None:
        mixin = module.BeamSearchOfflineMixin
        if not hasattr(mixin.beam_search, _WRAPPED):
            mixin.beam_search = _wrap_offline(mixin.beam_search)


def install_online() -> None:
    """Know beam searches in an API server, and refuse settings of ours for them. Idempotent."""
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    if not hasattr(BeamSearchOnlineMixin.beam_search, _WRAPPED):
        BeamSearchOnlineMixin.beam_search = _wrap_online(BeamSearchOnlineMixin.beam_search)
    speech = [getattr(sys.modules[m], c) for m, c in _SPEECH.items() if m in sys.modules]
    for kind in (CompletionRequest, ChatCompletionRequest, *speech):
        if not hasattr(kind.to_beam_search_params, _WRAPPED):
            kind.to_beam_search_params = _refusing(kind.to_beam_search_params)


def _wrap_offline(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _under_way.set(True)
        try:
            return original(self, *args, **kwargs)
        finally:
            _under_way.reset(before)

    setattr(beam_search, _WRAPPED, True)
    return beam_search


def _wrap_online(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def beam_search(self: Any, prompt: Any, request_id: str, params: Any, **kwargs: Any) -> Any:
        # Before a streamed answer begins, so that this can still be HTTP 400.
        tokens = prompt.get("decoder_prompt", prompt).get("prompt_token_ids")
        vllm_config = getattr(self.engine_client, "vllm_config", None)
        if tokens is not None and vllm_config is not None:
            longest = vllm_config.model_config.max_model_len
            check_length(vllm_config, min(len(tokens) + params.max_tokens, longest))
        return _searching(original(self, prompt, request_id, params, **kwargs))

    setattr(beam_search, _WRAPPED, True)
    return beam_search


async def _searching(search: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield the results of a beam search. Tasks that it starts are marked as its own."""
    try:
        while True:
            before = _under_way.set(True)
            try:
                found = await anext(search)
            except StopAsyncIteration:
                return
            finally:
                _under_way.reset(before)
            yield found
    finally:
        await search.aclose()


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        keys = sorted(key for key in self.vllm_xargs or {} if str(key).startswith(CONFIG_KEY))
        if keys:
            raise ValueError(
                f"KV eviction: {', '.join(keys)} cannot be combined with use_beam_search: beam "
                "search is never evicted"
            )
        return original(self, *args, **kwargs)

    setattr(to_beam_search_params, _WRAPPED, True)
    return to_beam_search_params

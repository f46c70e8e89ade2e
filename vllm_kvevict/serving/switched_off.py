"""A server whose eviction was switched off explicitly, by ``--kv-eviction none`` for a rollback.

It is stock vLLM, but for one thing: its API servers drop our keys from ``vllm_xargs``, so that
requests that were written for a server that evicts are still answered. vLLM itself answers a
mapping with HTTP 400.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BeforeValidator
from vllm.logger import init_logger

from vllm_kvevict.config.requests import KEYS
from vllm_kvevict.serving.recommend import is_parent

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kv_eviction.switched_off")

_API_SERVER = "vllm.entrypoints.launchers.api_server.entry"
"""Loaded in API servers only."""


def without_keys(xargs: Any) -> Any:
    """Return ``vllm_xargs`` without our keys; None if nothing else was in it.

    Keys that no server that evicts knows stay, and are judged by vLLM like any other.
    """
    if not isinstance(xargs, Mapping) or not any(key in xargs for key in KEYS):
        return xargs
    return {key: value for key, value in xargs.items() if key not in KEYS} or None


_DROP = BeforeValidator(without_keys)


def switch_off(vllm_config: "VllmConfig") -> None:
    """Drop our keys from the requests of this process, if it is an API server. Idempotent.

    Args:
        vllm_config: vLLM's own, without settings of ours.

    """
    if _API_SERVER in sys.modules:
        _drop_keys()
    if is_parent(vllm_config):
        logger.info(
            "KV eviction is off, as --kv-eviction none asks: the other --kv-eviction flags have no "
            "effect, and the API server ignores the kv_eviction keys of requests."
        )


def _drop_keys() -> None:
    """Change the classes from which an API server builds its routes after its engine is
    configured."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
    from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

    kinds: tuple[Any, ...] = (
        *(ChatCompletionRequest, CompletionRequest, ResponsesRequest, AnthropicMessagesRequest),
        *(TranscriptionRequest, TranslationRequest),
    )
    for kind in kinds:
        metadata = kind.model_fields["vllm_xargs"].metadata
        if _DROP not in metadata:
            metadata.append(_DROP)
            kind.model_rebuild(force=True)

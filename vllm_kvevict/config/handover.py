"""Prompts that one server computes and another one answers, in the format of vLLM's proxies."""

from collections.abc import Mapping
from typing import Any

PARAMS = "kv_transfer_params"
"""Key of ``SamplingParams.extra_args`` under which vLLM's front ends store the request's field."""

TAKEN_OVER = {"do_remote_prefill": True, "do_remote_decode": False}
"""Response of a server that computed a prompt. A proxy adds it to the request that it sends on."""


def hands_over(params: Mapping[str, Any] | None) -> bool:
    """Return whether another server answers this prompt."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def takes_over(params: Mapping[str, Any] | None) -> bool:
    """Return whether another server has computed this prompt."""
    return isinstance(params, Mapping) and params.get("do_remote_prefill") is True


def shares_prompt(extra_args: Mapping[str, Any] | None) -> bool:
    """Return whether one server computes a request's prompt and another one answers it."""
    params = (extra_args or {}).get(PARAMS)
    return hands_over(params) or takes_over(params)


def one_token(max_tokens: int | None) -> str:
    """Return why a prompt whose blocks another server reads is answered with one token."""
    return (
        "KV eviction: a request with do_remote_decode is never evicted, because another server "
        f"reads its blocks and answers it; set max_tokens to 1, not {max_tokens}"
    )

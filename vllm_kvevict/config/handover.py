"""Prompts that one server computes and another one answers, as vLLM's proxies mark them."""

from collections.abc import Mapping
from typing import Any

PARAMS = "kv_transfer_params"
"""Key of ``SamplingParams.extra_args`` where vLLM's front ends put the request's field."""

TAKEN_OVER = {"do_remote_prefill": True, "do_remote_decode": False}
"""What a server that computed a prompt answers, and a proxy sends on with the request."""


def hands_over(params: Mapping[str, Any] | None) -> bool:
    """Whether another server answers this prompt."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def takes_over(params: Mapping[str, Any] | None) -> bool:
    """Whether another server has computed this prompt."""
    return isinstance(params, Mapping) and params.get("do_remote_prefill") is True


def shares_prompt(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether one server computes a request's prompt and another one answers it."""
    params = (extra_args or {}).get(PARAMS)
    return hands_over(params) or takes_over(params)

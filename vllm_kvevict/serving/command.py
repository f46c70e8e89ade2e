"""Code that the commands share: the default policy, and errors in one sentence."""

import argparse

from vllm_kvevict.config.names import CONFIG_KEY, DEFAULT_POLICY


class CommandError(Exception):
    """A command cannot do what it was asked for. The message is one sentence."""


def evict_by_default(
    args: argparse.Namespace, policy: str = DEFAULT_POLICY, budget: str | None = None
) -> None:
    """Set ``--kv-eviction`` and its budget in ``args`` where the command line has none."""
    if not hasattr(args, "kv_eviction") and CONFIG_KEY not in (args.additional_config or {}):
        args.kv_eviction = policy
    if budget is not None and not hasattr(args, "kv_eviction_budget"):
        args.kv_eviction_budget = budget


def first_line(error: Exception) -> str:
    """The sentence in an error of vLLM's; pydantic wraps it in lines of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrapped = [line for line in lines if line.startswith("Value error, ")]
    line = (wrapped or lines or [type(error).__name__])[0]
    return line.removeprefix("Value error, ").split(" [type=")[0]

"""Whose budget is chosen by a target, and whose is not."""

from collections.abc import Mapping
from typing import Any

from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.handover import shares_prompt
from vllm_kvevict.settings.names import KEY, NONE, plain_name
from vllm_kvevict.settings.target import parse_target

TARGET = f"{KEY}_target"

BUDGET = f"{KEY}_budget"

NO_TRIALS = ("h2o", "subgen-stream")
"""Policies whose evictions cannot be tried: attention of all queries would be computed once more
for each budget, or kept tokens have weights."""


def target_of(
    config: EvictionConfig,
    extra_args: Mapping[str, Any] | None,
    policy: str,
    when: str,
    inside: int | None,
) -> float | None:
    """The target of a request: its own, or the server's; None where its budget is its own.

    Args:
        config: The server's settings.
        extra_args: What the request asks for.
        policy: The policy that it has, or none.
        when: When it is evicted.
        inside: Its own interval between evictions inside the prompt; None for the server's.

    Raises:
        ValueError: In one sentence, why the target that it asks for cannot be kept.

    """
    extra = extra_args or {}
    need = _unmet(config, extra, policy, when)
    if need is None and (config.prefill_interval if inside is None else inside):
        need = f"{KEY}_prefill_interval 0"
    if TARGET not in extra:
        return None if need is not None or BUDGET in extra else config.target
    if need is not None:
        raise ValueError(f"KV eviction: {TARGET} needs {need}")
    try:
        target = parse_target(extra[TARGET])
    except ValueError as error:
        raise ValueError(f"KV eviction: {TARGET}: {error}") from None
    if BUDGET in extra:
        raise ValueError(f"KV eviction: {TARGET} chooses the budget; leave {BUDGET} or it away")
    assert config.target is not None
    if config.max_budget is not None and target > config.target:
        raise ValueError(
            f"KV eviction: {TARGET} must be at most {config.target:g} on this server, which caps "
            f"budgets, not {target:g}"
        )
    return target


def _unmet(config: EvictionConfig, extra: Mapping[str, Any], policy: str, when: str) -> str | None:
    """What a request lacks for a target; None where it may have one."""
    if config.target is None:
        return "a server with --kv-eviction-target"
    if policy == NONE:
        return f"a policy, not {NONE}"
    if plain_name(policy) in NO_TRIALS:
        return f"another policy than {policy}, whose evictions cannot be tried"
    if when != "always":
        return f"{KEY}_when always"
    if shares_prompt(extra):
        return "a prompt that this server both computes and answers"
    return None


def check_target(config: EvictionConfig) -> None:
    """Refuse a server's target that none of its requests could have.

    Raises:
        ValueError: In one sentence, what to do.

    """
    if config.target is None:
        return
    if plain_name(config.policy) in NO_TRIALS:
        raise ValueError(
            f"KV eviction: --kv-eviction-target tries budgets, and those of {config.policy} cannot "
            "be tried; choose another policy or remove it."
        )
    if config.when != "always" or config.prefill_interval:
        flag = "--kv-eviction-when pressure" if config.when != "always" else ""
        raise ValueError(
            "KV eviction: --kv-eviction-target chooses a budget where a prompt ends; remove "
            f"{flag or '--kv-eviction-prefill-interval'} or it."
        )

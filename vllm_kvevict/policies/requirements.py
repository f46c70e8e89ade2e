"""What the policies of a server require together. Engine and workers agree through it."""

from typing import TYPE_CHECKING

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.memory_budget import RING_BYTES, ring_bytes
from vllm_kvevict.policies.base import Requirements
from vllm_kvevict.policies.registry import build_policies

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.timeline.rule import EvictionRule

NOTHING = Requirements(window="none", keys=False)
"""Requirements of a request that never evicts."""


def policy_requirements(config: EvictionConfig) -> dict[str, Requirements]:
    """The requirements of every policy that a request of this server may run under, by name."""
    return {name: policy.requirements for name, policy in build_policies(config).items()}


def ring_slots(vllm_config: "VllmConfig", config: EvictionConfig) -> int:
    """Ring slots of one rank; 0 where no policy that a request may choose reads queries.

    One for every sequence where that fits into :data:`RING_BYTES`, else as many as do. With
    fewer slots than sequences an eviction may wait for one: it is postponed and counted.
    """
    if all(needs.window == "none" for needs in policy_requirements(config).values()):
        return 0
    affordable = max(1, RING_BYTES // ring_bytes(vllm_config, config))
    return min(vllm_config.scheduler_config.max_num_seqs, affordable)


def sustained(slots: int, rule: "EvictionRule") -> int | None:
    """Sequences that evict as often as the interval says with so many ring slots.

    Each needs one for the window of every interval; with more of them, evictions come less often.

    Returns:
        None where nothing evicts after prefill, or no slot is needed: no bound.

    """
    return slots * rule.stride // min(rule.window, rule.stride) if slots and rule.stride else None


def floats_per_token(config: EvictionConfig) -> int:
    """Floats of each cached token that the policies of this server require, at most."""
    return max(needs.floats_per_token for needs in policy_requirements(config).values())

"""Combined requirements of the policies of a server, for the engine and the workers."""

from typing import TYPE_CHECKING

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.memory_budget import ring_bytes
from vllm_kvevict.config.store_tiers import parse_size
from vllm_kvevict.policies.base import Requirements
from vllm_kvevict.policies.registry import build_policies

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.rules.rule import EvictionRule

NOTHING = Requirements(window="none", keys=False)
"""Requirements of a request that never evicts."""


def policy_requirements(config: EvictionConfig) -> dict[str, Requirements]:
    """Return the requirements of every policy that a request may select, by name."""
    return {name: policy.requirements for name, policy in build_policies(config).items()}


def ring_slots(vllm_config: "VllmConfig", config: EvictionConfig) -> int:
    """Return the number of ring slots of one rank; 0 if no policy reads queries.

    There is one slot for every sequence, but at most as many as fit into the ``ring_memory`` of the
    configuration, and at least one. With fewer slots than sequences, an eviction without a slot is
    postponed and counted.
    """
    if all(needs.window == "none" for needs in policy_requirements(config).values()):
        return 0
    affordable = max(1, parse_size(config.ring_memory) // ring_bytes(vllm_config, config))
    return min(vllm_config.scheduler_config.max_num_seqs, affordable)


def sustained(slots: int, rule: "EvictionRule") -> int | None:
    """Return the number of sequences for which the ring slots suffice to evict at every interval.

    Each sequence needs a slot for one window in every interval. With more sequences, evictions are
    less frequent.

    Returns:
        None if there is no bound: there are no evictions after prefill, or no slot is needed.

    """
    return slots * rule.stride // min(rule.window, rule.stride) if slots and rule.stride else None


def floats_per_token(config: EvictionConfig) -> int:
    """Return the maximum number of floats per cached token that a policy of this server needs."""
    return max(needs.floats_per_token for needs in policy_requirements(config).values())

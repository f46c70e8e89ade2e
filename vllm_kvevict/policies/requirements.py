"""What the policies of a server need beside the KV cache. Engine and workers agree through it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vllm_kvevict.policies.base import Policy, WeightedScorer
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.memory import RING_BYTES, ring_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.schedule.timeline import Timeline


@dataclass(frozen=True)
class PolicyRequirements:
    """What a policy needs of the engine.

    Args:
        window: Whether the queries of the window must be recorded before it evicts, are read
            where they were, or are not read.
        accumulates_attention: Whether the attention of every query is added up.
        shares_stores: Whether requests may reuse what its evictions keep.
        weighs: Whether what it keeps has weights, which attention reads.
        reads_share: Whether its scores depend on the share of tokens that the budget keeps.

    """

    window: Literal["required", "optional", "none"]
    accumulates_attention: bool
    shares_stores: bool
    weighs: bool = False
    reads_share: bool = False


NOTHING = PolicyRequirements("none", accumulates_attention=False, shares_stores=False)
"""What a request needs that never evicts."""


def policy_requirements(config: EvictionConfig) -> dict[str, PolicyRequirements]:
    """The needs of every policy that a request of this server may run under, by name."""
    return {
        name: PolicyRequirements(
            _window(policy),
            policy.accumulates_attention,
            shares_stores(policy),
            isinstance(policy.scorer, WeightedScorer),
            policy.scorer.needs_key_scores,
        )
        for name, policy in build_policies(config).items()
    }


def _window(policy: Policy) -> Literal["required", "optional", "none"]:
    if policy.needs_window:
        return "required"
    return "optional" if policy.wants_window else "none"


def ring_slots(vllm_config: "VllmConfig", config: EvictionConfig) -> int:
    """Ring slots of one rank; 0 where no policy that a request may choose reads queries.

    One for every sequence where that fits into :data:`RING_BYTES`, else as many as do. With
    fewer slots than sequences an eviction may wait for one: it is postponed and counted.
    """
    policies = build_policies(config).values()
    if not any(policy.needs_window or policy.wants_window for policy in policies):
        return 0
    affordable = max(1, RING_BYTES // ring_bytes(vllm_config, config))
    return min(vllm_config.scheduler_config.max_num_seqs, affordable)


def sustained(slots: int, rule: "Timeline") -> int | None:
    """Sequences that evict as often as the interval says with so many ring slots.

    Each needs one for the window of every interval; with more of them, evictions come less often.

    Returns:
        None where nothing evicts after prefill, or no slot is needed: no bound.

    """
    return slots * rule.stride // min(rule.window, rule.stride) if slots and rule.stride else None


def page_channels(config: EvictionConfig) -> int:
    """Numbers beside every cached token that the policies of this server need, at most."""
    return max(policy.scorer.page_channels for policy in build_policies(config).values())


def shares_stores(policy: Policy) -> bool:
    """Whether what an eviction keeps depends on the tokens before it alone, and stays as it is.

    Draws are seeded by the whole prompt, sums of attention go on, and log-weights come with a
    memory of the request.
    """
    scorer = policy.scorer
    return not (scorer.random or scorer.accumulates_attention or isinstance(scorer, WeightedScorer))

"""Policies by name. A new policy is one file beside this one and one line here.

The table holds strings, so that reading the valid names imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm_kvevict.policies.base import Policy
    from vllm_kvevict.settings.config import EvictionConfig

ADA = "ada-"
"""Before a policy's name: its scores, and the heads of a layer share the budget (Ada-KV)."""


class Entry(NamedTuple):
    """A policy of its own.

    Args:
        module: Module beside this one whose ``build(config)`` makes the scorer.
        summary: One line for ``--help``.
        adaptive: Whether scores of different heads compare, so that :data:`ADA` may stand
            before the name.
        pyramid: Whether budgets fall with the depth of a layer.
        ada: Name with the heads of a layer sharing the budget, where the paper has another one
            than :data:`ADA` and the name.

    """

    module: str
    summary: str
    adaptive: bool
    pyramid: bool = False
    ada: str = ""


TABLE = {
    "snapkv": Entry(
        "snapkv", "attention of the last queries, pooled; every head keeps as much", True
    ),
    "h2o": Entry("h2o", "attention of all queries so far (heavy hitters), and recent tokens", True),
    "pyramidkv": Entry(
        "snapkv",
        "scores of snapkv; shallow layers keep more than deep ones",
        True,
        pyramid=True,
        ada="ada-pyramid",
    ),
    "streaming-llm": Entry("streaming_llm", "the first tokens and the most recent ones", False),
    "scissorhands": Entry(
        "scissorhands", "how seldom the last queries gave a token less than the mean", True
    ),
    "tova": Entry("tova", "attention of the last query alone (TOVA, MSRNN)", True),
    "subgen": Entry("subgen", "keys that leave no other key far away (greedy k-center)", False),
    "subgen-stream": Entry(
        "subgen_stream", "samples of all tokens, which attention weighs (SubGen Algorithm 1)", False
    ),
    "nacl": Entry(
        "nacl", "attention of the last tokens (proxies), and a random sample of the others", False
    ),
}


def _names() -> dict[str, tuple[str, str]]:
    lines = {}
    for name, entry in TABLE.items():
        if entry.adaptive:
            summary = f"scores of {name}; the heads of a layer share the budget (Ada-KV)"
            lines[entry.ada or ADA + name] = (entry.module, summary)
        lines[name] = (entry.module, entry.summary)
    return lines


POLICIES = _names()
"""Module and one line for ``--help`` of everything that ``--kv-eviction`` may name."""

POLICY_NAMES = tuple(POLICIES)

PYRAMIDS = frozenset(
    name
    for plain, entry in TABLE.items()
    if entry.pyramid
    for name in (plain, entry.ada or ADA + plain)
)
"""Policies under which layers have budgets of their own."""


def build_policy(config: "EvictionConfig") -> "Policy":
    """The policy that ``config`` names, with its parameters filled in."""
    from vllm_kvevict.policies.allocators import Adaptive, Uniform
    from vllm_kvevict.policies.base import Policy

    module, summary = POLICIES[config.policy]
    scorer = import_module(f"vllm_kvevict.policies.{module}").build(config)
    if config.policy.startswith(ADA):
        return Policy(config.policy, summary, scorer.per_head(), Adaptive(config.floor))
    return Policy(config.policy, summary, scorer, Uniform())


def build_policies(config: "EvictionConfig") -> dict[str, "Policy"]:
    """Every policy that a request of this server may run under, by name."""
    return {
        name: build_policy(config.model_copy(update={"policy": name})) for name in config.policies
    }

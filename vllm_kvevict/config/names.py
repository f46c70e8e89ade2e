"""Policies by name: data alone. A new policy is one file and one line here.

The table holds strings, so that reading the valid names imports no torch.
"""

from typing import NamedTuple

CONFIG_KEY = "kv_eviction"
"""Key of the configuration in ``VllmConfig.additional_config``."""

AUTO = "auto"
"""The policy that suits the model and the server best; a profile that is found for the model."""

MEASURE = "measure"
"""A profile that is found as by :data:`AUTO`, and measured where there is none."""

REPLAY = "-audit-"
"""Before the number at the end of the name of a request that replays another one's last tokens."""

DEFAULT_POLICY = AUTO
"""What commands and deployments take where nobody chose."""

NONE = "none"
"""What a request or a server says for no eviction."""

ADA = "ada-"
"""Before a policy's name: its scores, and the heads of a layer share the budget (Ada-KV)."""


class Entry(NamedTuple):
    """A policy of its own.

    Args:
        module: Module with the function ``build(config)``, which returns the scorer.
        summary: One line for ``--help``.
        adaptive: Whether scores of different heads and layers compare, so that :data:`ADA` may
            stand before the name, and layers may have measured shares of the budget.
        pyramid: Whether budgets fall with the depth of a layer.
        ada: Name with the heads of a layer sharing the budget, where the paper has another one
            than :data:`ADA` and the name.
        learned: Whether its scores were learned for the model, whose profile holds them.
        options: Fields of ``PolicyOptions`` that it reads; :data:`ADA` adds ``floor``.

    """

    module: str
    summary: str
    adaptive: bool
    pyramid: bool = False
    ada: str = ""
    learned: bool = False
    options: tuple[str, ...] = ()


TABLE = {
    "snapkv": Entry(
        "vllm_kvevict.policies.snapkv",
        "attention of the last queries, pooled; every head keeps as much",
        True,
        options=("pool_kernel", "pool"),
    ),
    "defensive": Entry(
        "vllm_kvevict.policies.defensive",
        "highest attention of the last queries, times the share of the values",
        True,
    ),
    "probe": Entry(
        "vllm_kvevict.policies.probe",
        "what the model's profile says of a key, and the last queries",
        True,
        learned=True,
        options=("probe_window", "probe_recent"),
    ),
    "h2o": Entry(
        "vllm_kvevict.papers.h2o",
        "attention of all queries so far (heavy hitters), and recent tokens",
        True,
        options=("recent_share",),
    ),
    "pyramidkv": Entry(
        "vllm_kvevict.policies.snapkv",
        "scores of snapkv; shallow layers keep more than deep ones",
        True,
        pyramid=True,
        ada="ada-pyramid",
        options=("pool_kernel", "pool"),
    ),
    "streaming-llm": Entry(
        "vllm_kvevict.policies.streaming_llm",
        "the first tokens and the most recent ones",
        False,
        options=("sinks",),
    ),
    "scissorhands": Entry(
        "vllm_kvevict.papers.scissorhands",
        "how seldom the last queries gave a token less than the mean",
        True,
    ),
    "tova": Entry(
        "vllm_kvevict.policies.tova", "attention of the last query alone (TOVA, MSRNN)", True
    ),
    "subgen": Entry(
        "vllm_kvevict.papers.subgen",
        "keys that leave no other key far away (greedy k-center)",
        False,
    ),
    "subgen-stream": Entry(
        "vllm_kvevict.papers.subgen_stream",
        "samples of all tokens, which attention weighs (SubGen Algorithm 1)",
        False,
        options=("seed", "radius", "cluster_samples", "value_share"),
    ),
    "nacl": Entry(
        "vllm_kvevict.papers.nacl",
        "attention of the last tokens (proxies), and a random sample of the others",
        False,
        options=("random_share", "seed"),
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

PLAIN = {entry.ada or ADA + plain: plain for plain, entry in TABLE.items() if entry.adaptive}
"""The policy whose scores an adaptive one shares budgets by."""

PYRAMIDS = frozenset(
    name
    for plain, entry in TABLE.items()
    if entry.pyramid
    for name in (plain, entry.ada or ADA + plain)
)
"""Policies whose budgets fall with the depth of a layer."""

LEARNED = frozenset(
    name
    for plain, entry in TABLE.items()
    if entry.learned
    for name in (plain, entry.ada or ADA + plain)
)
"""Policies whose scores are in the model's profile."""

COMPARABLE = tuple(
    name
    for plain, entry in TABLE.items()
    if entry.adaptive and not entry.pyramid
    for name in (entry.ada or ADA + plain, plain)
)
"""Policies under which layers may have measured shares of the budget."""


def plain_name(policy: str) -> str:
    """The policy of :data:`TABLE` behind a built-in name."""
    return PLAIN.get(policy, policy)


def keeps_by_layer(policy: str, measured: bool) -> bool:
    """Whether layers have budgets of their own under a policy.

    Args:
        policy: A policy of a server whose layers have shares.
        measured: Whether these are measured; else they fall with depth.

    """
    return policy in (COMPARABLE if measured else PYRAMIDS)


def is_replay(request_id: str) -> bool:
    """Whether a request of the engine's own may have this name."""
    return request_id.rpartition(REPLAY)[2].isdecimal() and REPLAY in request_id

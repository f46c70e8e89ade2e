"""Policies by name, as pure data. A new policy is one file and one line here.

The table contains strings, so that reading the valid names does not import torch.
"""

from typing import NamedTuple

CONFIG_KEY = "kv_eviction"
"""Key of the configuration in ``VllmConfig.additional_config``."""

AUTO = "auto"
"""Automatic choice: the best policy for the model and the server, or an available profile of the
model."""

CALIBRATE = "calibrate"
"""An available profile as for :data:`AUTO`, made at start-up if there is none."""

REPLAY = "-audit-"
"""Separator before the number at the end of the id of a replay request."""

DEFAULT_POLICY = AUTO
"""Policy of commands and deployments if none is given."""

NONE = "none"
"""Value for no eviction, in requests and server settings."""

ADA = "ada-"
"""Prefix of policies that use the scores of the named policy and share the budget among the heads
of a layer (Ada-KV)."""


class Entry(NamedTuple):
    """An entry of the policy table.

    Args:
        module: Module with the function ``build(config)``, which returns the scorer.
        summary: One line for ``--help``.
        adaptive: True if scores of different heads and layers are comparable, so that the policy
            also exists with the prefix :data:`ADA`, and layers may have measured shares of the
            budget.
        pyramid: True if budgets decrease with the depth of a layer.
        ada: Name of the variant with a budget shared among the heads of a layer, if the paper uses
            a name other than :data:`ADA` and the policy's name.
        learned: True if its scores were learned for the model and are stored in its profile.
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
        "attention of the last queries, pooled; equal budgets for all heads",
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
        "learned scores of keys from the model's profile, and the last queries",
        True,
        learned=True,
        options=("probe_window", "probe_recent"),
    ),
    "h2o": Entry(
        "vllm_kvevict.policies.h2o",
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
        "vllm_kvevict.policies.scissorhands",
        "how rarely the last queries gave a token less attention than the mean",
        True,
    ),
    "tova": Entry(
        "vllm_kvevict.policies.tova", "attention of the last query alone (TOVA, MSRNN)", True
    ),
    "subgen": Entry(
        "vllm_kvevict.policies.subgen",
        "keys that leave no other key far away (greedy k-center)",
        False,
    ),
    "subgen-stream": Entry(
        "vllm_kvevict.policies.subgen_stream",
        "samples of all tokens, which attention weighs (SubGen Algorithm 1)",
        False,
        options=("seed", "radius", "cluster_samples", "value_share"),
    ),
    "nacl": Entry(
        "vllm_kvevict.policies.nacl",
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
"""Module and summary of every valid name for ``--kv-eviction``."""

POLICY_NAMES = tuple(POLICIES)

PLAIN = {entry.ada or ADA + plain: plain for plain, entry in TABLE.items() if entry.adaptive}
"""Policy that provides the scores of each adaptive policy."""

PYRAMIDS = frozenset(
    name
    for plain, entry in TABLE.items()
    if entry.pyramid
    for name in (plain, entry.ada or ADA + plain)
)
"""Policies with budgets that decrease with the depth of a layer."""

LEARNED = frozenset(
    name
    for plain, entry in TABLE.items()
    if entry.learned
    for name in (plain, entry.ada or ADA + plain)
)
"""Policies with scores from the model's profile."""

COMPARABLE = tuple(
    name
    for plain, entry in TABLE.items()
    if entry.adaptive and not entry.pyramid
    for name in (entry.ada or ADA + plain, plain)
)
"""Policies under which layers may have measured shares of the budget."""


def plain_name(policy: str) -> str:
    """Return the policy of :data:`TABLE` that a built-in name refers to."""
    return PLAIN.get(policy, policy)


def keeps_by_layer(policy: str, measured: bool) -> bool:
    """Return whether layers have individual budgets under a policy.

    Args:
        policy: A policy of a server with shares by layer.
        measured: True if the shares are measured; otherwise they decrease with depth.

    """
    return policy in (COMPARABLE if measured else PYRAMIDS)


def is_replay(request_id: str) -> bool:
    """Return whether an internal request may have this id."""
    return request_id.rpartition(REPLAY)[2].isdecimal() and REPLAY in request_id

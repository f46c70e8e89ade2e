"""The plan of one step, sent from the scheduler to the workers. Plain data, pickled with the
step."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Self

PLAN = "kv_eviction_plan"
"""Attribute of vLLM's ``SchedulerOutput`` that carries the :class:`StepPlan`."""

STEPS_AHEAD = "kv_eviction_steps_ahead"
"""Attribute of vLLM's ``SchedulerOutput`` with the number of earlier steps that were not processed
when it was planned, if a connector saves what requests compute."""


@dataclass
class GroupEviction:
    """One request's eviction in one KV-cache group.

    Block ids are vLLM's physical block ids. ``positional`` holds every block from the old tail
    start to the end of the request; ``store`` are the blocks to fill. The first ``reused`` of them
    are also in ``old_store`` or ``positional``, so every survivor of a layer must be read before
    any is written. If the store is ``published``, the workers keep its head split for other
    requests, under the id of its first block.
    """

    group_id: int
    old_tail_start: int
    tail_start: int
    old_store: list[int]
    positional: list[int]
    store: list[int]
    reused: int = 0
    published: bool = False


@dataclass
class Eviction:
    """An eviction that runs after the forward pass of the step that carries it.

    ``num_tokens`` counts the tokens in the cache after that forward pass; ``ring`` is the slot with
    the queries of the last w of them, or None for policies that need none. ``policy`` is the name
    of the policy; the first ``protect_first`` tokens are kept in any case.
    ``share`` is the share of its tokens that the request keeps by its budget. ``in_context`` is
    True inside a context that the request names.
    """

    request_id: str
    num_tokens: int
    ring: int | None
    groups: list[GroupEviction]
    policy: str
    protect_first: int = 0
    share: float = 0.0
    in_context: bool = False


@dataclass
class ReusedStore:
    """A published store that a request uses in one KV-cache group from its first step on."""

    group_id: int
    tail_start: int
    store: list[int]


@dataclass
class StoreBlocks:
    """Blocks of a published store in one KV-cache group: the kept tokens, and the tail after
    them."""

    group_id: int
    store: list[int]
    tail: list[int]

    @property
    def blocks(self) -> list[int]:
        return self.store + self.tail


@dataclass
class StoreCopy:
    """A published store that is copied out of the KV cache, or into it.

    ``name`` identifies the store outside the KV cache; it is a digest of the key. ``keep`` means
    that host memory holds the store afterwards, and ``write`` that a file does. If host memory does
    not hold the store, ``payload`` has a handle (:data:`vllm_kvevict.stores.region.Handle`) of the
    content of its file for each rank.
    """

    name: str
    groups: list[StoreBlocks]
    keep: bool
    write: bool = False
    payload: list[tuple[str, str, int]] | None = None


@dataclass
class HiddenStateSpan:
    """Positions [first, end) of a request with hidden states to keep, the last w of them. The step
    of the request begins at ``start``."""

    start: int
    first: int
    end: int


@dataclass
class Replay:
    """Tokens [start, end) of the request ``of``, computed again over the cache after its eviction.

    ``request_id`` is the internal request that computes them. ``kept`` is the share of the tokens
    before ``end`` that was kept, over all heads and layers.
    """

    request_id: str
    of: str
    policy: str
    kept: float
    start: int
    end: int


@dataclass
class StepPlan:
    """The plan of one step.

    Args:
        rings: Slot that records the last queries of the step, by request id.
        evictions: Evictions after the forward pass.
        accumulating: Requests with a policy that counts the attention of every query, as long as an
            eviction is to come.
        reused: Stores of the requests that this step admits, by request id.
        loads: Stores to copy into the KV cache before the forward pass.
        saves: Stores to copy out of the KV cache after the evictions, which make them.
        saves_first: Stores to copy out of the KV cache before the ``loads`` and the forward pass,
            because the step may hand out their blocks or evict into them.
        forgotten: Names of stores that host memory no longer holds; removed before the saves.
        weigh: Number of a reset of the prefix cache, or 0. The workers then compute a checksum of
            their weights before the ``loads``, and use files of stores of these weights from then
            on.
        hidden_states: Hidden states to keep, by request id.
        replays: Replays of the step's evictions that will follow.
        compared: Replays that end with the step.
        dropped: Names of replays that will never run.
        settle: Copies of vLLM's offload that must finish before the evictions.
        settle_first: Copies of vLLM's offload that must finish before the ``loads``.

    """

    rings: dict[str, int] = field(default_factory=dict)
    evictions: list[Eviction] = field(default_factory=list)
    accumulating: list[str] = field(default_factory=list)
    reused: dict[str, list[ReusedStore]] = field(default_factory=dict)
    loads: list[StoreCopy] = field(default_factory=list)
    saves: list[StoreCopy] = field(default_factory=list)
    saves_first: list[StoreCopy] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    weigh: int = 0
    hidden_states: dict[str, HiddenStateSpan] = field(default_factory=dict)
    replays: list[Replay] = field(default_factory=list)
    compared: list[Replay] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    settle: set[int] = field(default_factory=set)
    settle_first: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def for_groups(self, groups: Collection[int]) -> Self:
        """Return the plan of a pipeline stage that has layers of these KV-cache groups only."""
        if not (self.evictions or self.reused):
            return self
        evictions = [
            replace(eviction, groups=[part for part in eviction.groups if part.group_id in groups])
            for eviction in self.evictions
        ]
        reused = {
            request_id: [store for store in stores if store.group_id in groups]
            for request_id, stores in self.reused.items()
        }
        return replace(self, evictions=evictions, reused=reused)

"""What the scheduler tells the workers about one step. Plain data, pickled with the step."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Self

PLAN = "kv_eviction_plan"
"""Attribute of vLLM's ``SchedulerOutput`` that carries the :class:`StepPlan`."""


@dataclass
class GroupEviction:
    """One request's eviction in one KV-cache group.

    Block ids are vLLM's physical block ids. ``positional`` holds every block from the old
    tail start to the end of the request; ``store`` are the blocks to fill. The first ``reused`` of
    those are in ``old_store`` or ``positional`` too: then every survivor of a layer must be read
    before one is written. How heads share a ``published`` store is kept for others, under the id
    of its first block.
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

    ``num_tokens`` counts the tokens in the cache after that forward pass; ``ring`` is the
    slot that holds the queries of the last w of them, or None for policies that need none.
    ``policy`` names what decides; the first ``protect_first`` tokens stay whatever it says.
    ``inside``: the window does not hold what is asked, because the prompt goes on behind it.
    ``share``: part of its tokens that the request keeps, by its budget.
    """

    request_id: str
    num_tokens: int
    ring: int | None
    groups: list[GroupEviction]
    policy: str
    protect_first: int = 0
    inside: bool = False
    share: float = 0.0


@dataclass
class ReusedStore:
    """A published store that a request has in one KV-cache group from its first step on."""

    group_id: int
    tail_start: int
    store: list[int]


@dataclass
class StoreBlocks:
    """Blocks of a published store in one KV-cache group: what was kept, and those behind it."""

    group_id: int
    store: list[int]
    tail: list[int]

    @property
    def blocks(self) -> list[int]:
        return self.store + self.tail


@dataclass
class StoreCopy:
    """A published store that is copied out of the KV cache, or into it.

    ``name`` is what it is called outside, a digest of its key. ``keep``: host memory holds it from
    then on; ``write``: so does a file. ``payload`` has, for each rank, a handle
    (:data:`vllm_kvevict.stores.region.Handle`) of the content of its file, if host memory does not
    hold the store.
    """

    name: str
    groups: list[StoreBlocks]
    keep: bool
    write: bool = False
    payload: list[tuple[str, str, int]] | None = None


@dataclass
class HiddenStateSpan:
    """Positions [first, end) of a request whose step begins at ``start``: their hidden states are
    kept, the last w of them."""

    start: int
    first: int
    end: int


@dataclass
class Replay:
    """Tokens [start, end) of the request ``of``, computed once more over what its eviction left.

    ``request_id`` is the engine's own request that does so. ``kept`` is the share of the tokens
    before ``end`` that was left, of all heads and layers.
    """

    request_id: str
    of: str
    policy: str
    kept: float
    start: int
    end: int


@dataclass
class StepPlan:
    """``rings``: slot that records the step's last queries, by request id.

    ``accumulating``: requests whose policy counts the attention of every query, as long as an
    eviction is to come. ``reused``: stores of requests that this step admits, by request id.
    ``loads`` come before the forward pass, ``saves`` after the evictions, which make them;
    ``forgotten`` are names that host memory no longer holds, in between. ``heard``: whose hidden
    states are kept, by request id; ``replays`` of the step's evictions will come, ``compared`` end
    with the step, and ``dropped`` are names of those that never will. ``settle``: copies of vLLM's
    offload that are finished before the evictions, ``settle_first`` those before the ``loads``.
    ``weigh`` is not 0 after a reset of the prefix cache: its number. Workers compute a checksum of
    their weights before the ``loads``, and use files of stores of these weights from then on.
    """

    rings: dict[str, int] = field(default_factory=dict)
    evictions: list[Eviction] = field(default_factory=list)
    accumulating: list[str] = field(default_factory=list)
    reused: dict[str, list[ReusedStore]] = field(default_factory=dict)
    loads: list[StoreCopy] = field(default_factory=list)
    saves: list[StoreCopy] = field(default_factory=list)
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

    def of(self, groups: Collection[int]) -> Self:
        """The plan of a pipeline stage that has layers of these KV-cache groups only."""
        if not (self.evictions or self.reused):
            return self
        evictions = [
            replace(eviction, groups=[one for one in eviction.groups if one.group_id in groups])
            for eviction in self.evictions
        ]
        reused = {
            request_id: [one for one in stores if one.group_id in groups]
            for request_id, stores in self.reused.items()
        }
        return replace(self, evictions=evictions, reused=reused)

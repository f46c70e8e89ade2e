"""One request's eviction, from its arrival to its end: the record that the whole engine reads."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from vllm_kvevict.config.requests import RequestOptions
from vllm_kvevict.policies.base import Requirements
from vllm_kvevict.timeline.progress import EvictionProgress
from vllm_kvevict.timeline.rule import EvictionRule
from vllm_kvevict.timeline.step_plan import GroupEviction

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_kvevict.engine.published import PublishedStore
    from vllm_kvevict.stores.key import ShareKey


class Phase(Enum):
    """Where a request stands.

    WAITING holds no blocks: the request is new, or was preempted. PREFILL computes its prompt, or
    replays. QUIET decodes far from its next eviction. NEAR decodes, and its coming step may record
    queries or evict.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    QUIET = "quiet"
    NEAR = "near"


@dataclass
class Holding:
    """Blocks of one request in one KV-cache group beside its positional ones.

    ``reserved`` are fresh blocks for an eviction to come. ``retiring`` pairs each eviction in
    flight with the blocks that it replaced. ``saved`` are the blocks that evictions of the request
    gave back to the pool, less those they took from it.
    """

    store: "list[KVCacheBlock]" = field(default_factory=list)
    reserved: "list[KVCacheBlock]" = field(default_factory=list)
    retiring: "list[tuple[GroupEviction, list[KVCacheBlock]]]" = field(default_factory=list)
    saved: int = 0

    def pop_retiring(self, eviction: GroupEviction) -> "list[KVCacheBlock]":
        """What an eviction of this request replaced; nothing if it is not one of them."""
        for index, (retiring, blocks) in enumerate(self.retiring):
            if retiring is eviction:
                del self.retiring[index]
                return blocks
        return []

    @property
    def blocks(self) -> "list[KVCacheBlock]":
        old = [block for _, blocks in self.retiring for block in blocks]
        return old + self.store + self.reserved


@dataclass(eq=False)
class RequestState:
    """Everything that the engine knows about the eviction of one request.

    Made when the request arrives, gone when its blocks are freed for good. A preempted request goes
    back to WAITING and begins anew. What the scheduler asks about every request in every step is
    kept as plain numbers.

    Args:
        request: vLLM's request.
        options: What it asked for.
        needs: What its policy needs.
        rules: The request's own rule of every group that evicts; empty for one that never does.
        longest: Tokens at which it ends at the latest.

    """

    request: "Request"
    options: RequestOptions
    needs: Requirements
    rules: Mapping[int, EvictionRule]
    longest: int
    phase: Phase = Phase.WAITING
    timelines: dict[int, EvictionProgress] = field(default_factory=dict)
    """By KV-cache group; while WAITING, what an admission would begin."""
    holdings: dict[int, Holding] = field(default_factory=dict)
    """Blocks beside the positional ones, by KV-cache group."""
    key: "ShareKey | None" = None
    """What its store at its eviction point depends on; None where it shares none."""
    reuse: "PublishedStore | None" = None
    """The published store that it begins with; None once the workers know of it."""
    given: "PublishedStore | None" = None
    """What a replay, a request of the engine's own, begins with; None for all others."""
    audited: bool = False
    """Whether its evictions are replayed, so that the queries before them must be computed."""
    replayed: frozenset[int] = frozenset()
    """Block ids that a replay of its last eviction holds."""
    store: "PublishedStore | None" = None
    """The published store over which it computes; None once it has evicted again."""
    suffix_published: int = 0
    """Tokens up to which full blocks after that store were published."""
    publish_at: int = 0
    """Length of the next step that can publish a block by hash; none before it is looked at."""
    admitted_at: int | None = None
    """Start of the step that admits it; None once that step is planned."""
    ring: int | None = None
    recorded_from: int = 0
    """First position whose query is in the ring; contiguous up to the last scheduled token."""
    evicted_at: int = 0
    """Length at its last eviction."""
    expected_gain: int = 0
    """Blocks that an eviction under pressure will give, until they are back; 0 for none."""
    pressure_order: int = 0
    """Number of its last eviction under pressure, among those of all requests; 0 for none."""
    evicted: bool = False
    """Whether it was evicted in any of its lives."""
    hit_capped: bool = False
    """Whether a prefix-cache hit of it was shortened."""
    prefill_end: int = 0
    """Tokens of the prefill; 0 for a request that never evicts."""
    next_eviction: int = sys.maxsize
    """Length at which the next eviction of any group is due."""
    quiet_until: int = sys.maxsize
    """Steps that end here or before neither evict nor compute a query that is needed."""
    computed_valid: int | None = None
    """Tokens from here on were computed over an evicted cache; None before any eviction."""
    version: int = 0
    """Changes with every eviction that is planned, deferred or asked for."""
    forecast: "tuple[int, list[tuple[int, int, int, int]]] | None" = None
    """What it adds to the forecast, with the version that this is true of."""
    _begun_with: int = -1
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id

    @property
    def evicts(self) -> bool:
        return bool(self.rules)

    @property
    def holds_blocks(self) -> bool:
        return self.phase is not Phase.WAITING

    @property
    def on_demand(self) -> bool:
        """Whether the request evicts under pressure only."""
        return self.evicts and self.options.when == "pressure"

    @property
    def must_evict(self) -> bool:
        """Whether evictions run whatever is shared, so that the request gets on.

        Where prompts evict as they stream in, requests with one prefix that all put it off, each
        because of the others, may not fit, and be preempted together for ever.
        """
        inside = any(t.timeline.prefill_stride for t in self.timelines.values())
        return inside and self.request.num_preemptions > 0

    def begin(self, reuse: "PublishedStore | None" = None) -> None:
        """While it waits: set out what an admission now would begin, over a published store or not.

        A preempted request replays what it has answered, so its prefill may have grown.
        """
        assert self.phase is Phase.WAITING
        if self._begun_with != self.request.num_tokens or self.reuse is not None:
            self.timelines = self.fresh_timelines()
            self._begun_with = self.request.num_tokens
            self.refresh()
        self.reuse = reuse
        if reuse is not None:
            reuse.advance(self.timelines)
            self.refresh()
            self.compute_over(reuse)

    def fresh_timelines(self) -> dict[int, EvictionProgress]:
        """Timelines of the request with nothing computed."""
        prompt, replay = self.request.num_prompt_tokens, self.request.num_tokens
        return {
            group: EvictionProgress(
                rule, prompt, replay, self.options.at, self.longest, self.on_demand
            )
            for group, rule in self.rules.items()
        }

    def release(self) -> None:
        """Its blocks are freed: back to WAITING, with nothing computed."""
        self.phase, self._begun_with = Phase.WAITING, -1
        self.reuse = self.store = self.admitted_at = None
        self.suffix_published = self.publish_at = self.evicted_at = 0
        self.expected_gain = self.pressure_order = 0

    def refresh(self) -> None:
        self.version += 1
        timelines = self.timelines.values()
        self.prefill_end = max((t.prefill_end for t in timelines), default=0)
        dues = [
            (t.next_eviction, t.next_eviction - t.timeline.window)
            for t in timelines
            if t.next_eviction is not None
        ]
        self.next_eviction = min((due for due, _ in dues), default=sys.maxsize)
        self.quiet_until = min((near for _, near in dues), default=sys.maxsize)
        valid = [t.computed_valid for t in timelines if t.computed_valid is not None]
        self.computed_valid = min(valid, default=None)

    def compute_over(self, store: "PublishedStore") -> None:
        """Note that what follows is computed over a published store."""
        self.store, self.suffix_published, self.publish_at = store, store.key.point, 0

    def request_eviction(self, dues: Mapping[int, int]) -> None:
        """Let groups of a request that evicts on demand do so, each at its length."""
        for group, due in dues.items():
            self.timelines[group].schedule_on_demand(due)
        self.refresh()

    def defer(self, group: int, end: int) -> None:
        """Put one group's eviction off to its next interval."""
        self.timelines[group].defer(end)
        self.refresh()

    def evict(self, group: int, end: int) -> tuple[int, int]:
        """Advance one group's timeline; returns the old and the new tail start."""
        tail_starts = self.timelines[group].evict(end)
        self.store, self.evicted, self.evicted_at = None, True, end
        self.refresh()
        return tail_starts

    def observes(self, end: int) -> bool:
        """Whether the step computes queries that some group will need."""
        return end > self.quiet_until

    def in_prefill(self, end: int) -> bool:
        """Whether the step belongs to the prefill."""
        return end <= self.prefill_end

    def coming_groups(self, end: int) -> list[int]:
        """Groups whose next eviction needs queries of the step."""
        return [group for group, t in self.timelines.items() if t.observes(end)]

    def due_groups(self, end: int) -> list[int]:
        """Groups whose eviction is due with the step."""
        return [group for group, t in self.timelines.items() if t.is_due(end)]

    def last_step(self, end: int) -> bool:
        """Whether the request surely ends with the step."""
        return end + 1 >= self.longest

    @property
    def accumulates_attention(self) -> bool:
        """Whether the attention of the coming queries is added up: an eviction will read it."""
        if not self.needs.every_query:
            return False
        return self.quiet_until < sys.maxsize or any(
            t.can_evict_on_demand for t in self.timelines.values()
        )

    @property
    def has_eviction_points(self) -> bool:
        """Whether chunks of prefill end at eviction points."""
        return any(t.has_eviction_points for t in self.timelines.values())

    def next_chunk_end(self, start: int) -> int | None:
        """The first eviction point after ``start`` where a chunk must end; None for none.

        An eviction that was postponed has its chance at every later one. A request's own point is
        one, whether its eviction was put off or not: who waits for its store then knows.
        """
        points = [t.next_chunk_end(start) for t in self.timelines.values()]
        return min((point for point in points if point is not None), default=None)

    def clip_chunk(self, start: int, end: int) -> int:
        """Where a chunk of prefill over [start, end) ends: at an eviction point, if there is one.

        The blocks of an eviction are free once its step was processed; a request that cannot go on
        without them would be preempted and come back to the same point without end, so it waits.
        """
        if not self.has_eviction_points:
            return end
        if self.in_prefill(end) and any(held.retiring for held in self.holdings.values()):
            return start
        point = self.next_chunk_end(start)
        return end if point is None else min(end, point)

    def evicts_inside(self, end: int) -> bool:
        """Whether a chunk that ends there evicts inside a prompt that evicts in intervals."""
        inside = end < self.prefill_end and end >= self.next_eviction
        return inside and any(t.timeline.prefill_stride for t in self.timelines.values())

    def most_drafts(self, num_tokens: int) -> int:
        """Draft tokens that the coming step of a decoding request may verify.

        A rejected draft has left its query in the ring and its attention in the sums. The ring
        gets the right query with the next step, if that comes before the eviction; sums never do.
        A step may only reach up to where queries are needed, not across.

        Args:
            num_tokens: Tokens of the request, the one that the step computes included.

        """
        if self.next_eviction == sys.maxsize:
            return sys.maxsize
        if self.needs.every_query:
            return 0
        if num_tokens <= self.quiet_until:
            return self.quiet_until - num_tokens
        window = min(t.timeline.window for t in self.timelines.values())
        return max(0, min(self.next_eviction - 1 - num_tokens, window - 1))

    def cacheable(self, num_tokens: int) -> int:
        """How many of the first ``num_tokens`` tokens may be published by hash."""
        valid = self.computed_valid
        return num_tokens if valid is None or valid > num_tokens else valid

    @property
    def hit_cap(self) -> int:
        """Most tokens that a prefix-cache hit may cover.

        A window that scores must be computed, and so must all that comes after an eviction point.
        Where the attention of every query counts, no query may be skipped. A policy that can do
        without a window gets it too: it knows a question at the prompt's end, for two blocks.
        """
        if self.accumulates_attention:
            return 0
        caps = [
            t.hit_cap
            for t in self.timelines.values()
            if (t.has_eviction_points and t.next_prefill_eviction is not None)
            or self.needs.window != "none"
            or self.audited
        ]
        return min([self.request.num_tokens, *caps])

    @property
    def reuse_cap(self) -> int:
        """Most tokens that it may have from a published store and what others computed over it.

        The window of its next eviction must be computed, and one token in any case.
        """
        caps = [t.hit_cap for t in self.timelines.values()]
        return min([self.request.num_tokens - 1, *caps])

"""One request's eviction, from its arrival to its end: the record that the whole engine reads.

The scheduler clips the chunk of prefill that would run across an eviction point. With async
scheduling the next chunk waits until the eviction was processed: without the blocks that it
frees, a full pool would preempt the request, which would be recomputed to the same point without
end.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from vllm_kvevict.config.requests import RequestOptions
from vllm_kvevict.policies.base import Requirements
from vllm_kvevict.rules.positions import FixedPositions, fixed_positions
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.rules.step_plan import GroupEviction

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_kvevict.engine.chain import Chain, Link
    from vllm_kvevict.engine.published import PublishedStore
    from vllm_kvevict.stores.key import ShareKey


class Phase(Enum):
    """Phase of a request.

    A WAITING request holds no blocks: it is new, or it was preempted. A request in PREFILL computes
    its prompt, or replays it. A QUIET request decodes far from its next eviction. A NEAR request
    decodes, and its next step may record queries or evict.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    QUIET = "quiet"
    NEAR = "near"


@dataclass
class Holding:
    """Blocks of one request in one KV-cache group, in addition to its positional blocks.

    ``reserved`` are fresh blocks for the next eviction. ``replaced_in_flight`` pairs each eviction
    in flight with the blocks that it replaced. ``net_blocks_freed`` is the number of blocks that
    the request's evictions returned to the pool, less the number that they took from it.
    """

    store: "list[KVCacheBlock]" = field(default_factory=list)
    reserved: "list[KVCacheBlock]" = field(default_factory=list)
    replaced_in_flight: "list[tuple[GroupEviction, list[KVCacheBlock]]]" = field(
        default_factory=list
    )
    net_blocks_freed: int = 0

    def pop_replaced(self, eviction: GroupEviction) -> "list[KVCacheBlock]":
        """Return the blocks that an eviction replaced and forget them; an empty list if the
        eviction is not one of this request's."""
        for index, (in_flight, blocks) in enumerate(self.replaced_in_flight):
            if in_flight is eviction:
                del self.replaced_in_flight[index]
                return blocks
        return []

    @property
    def blocks(self) -> "list[KVCacheBlock]":
        old = [block for _, blocks in self.replaced_in_flight for block in blocks]
        return old + self.store + self.reserved


@dataclass(eq=False)
class RequestState:
    """Everything that the engine knows about the eviction of one request.

    The record is created when the request arrives and is removed when its blocks are freed for
    good. A preempted request returns to WAITING and starts again. The values that the scheduler
    reads for every request in every step are plain numbers.

    Args:
        request: The request of vLLM.
        options: The settings that the request asked for.
        needs: The requirements of its policy.
        rules: The eviction rule of the request for every group that evicts; empty for a request
            that never evicts.
        max_length: Maximum length in tokens, prompt and answer.

    """

    request: "Request"
    options: RequestOptions
    needs: Requirements
    rules: Mapping[int, EvictionRule]
    max_length: int
    phase: Phase = Phase.WAITING
    progress: dict[int, EvictionProgress] = field(default_factory=dict)
    """Progress by KV-cache group. While the request is WAITING, this is the progress that an
    admission would start with."""
    holdings: dict[int, Holding] = field(default_factory=dict)
    """Blocks in addition to the positional ones, by KV-cache group."""
    kept_window: "list[KVCacheBlock]" = field(default_factory=list)
    """Blocks of layers that attend within a window, kept for the last store that the request made
    or started with, in addition to the positional ones."""
    store_key: "ShareKey | None" = None
    """Key of the store that the request makes at its eviction point; None if it shares no store."""
    chain: "Chain | None" = None
    """Stores at positions that depend on tokens alone, each of which the request makes or reuses;
    None if there are none, or if the server shares no stores."""
    links: int = 0
    """Number of stores of the chain that the request has made or reused."""
    on_chain: bool = True
    """False if an eviction did not run at its position, so that the request makes no store of its
    chain any more."""
    last_store: "PublishedStore | None" = None
    """Last store of its chain that the request has made or started with."""
    unpublished: "Link | None" = None
    """Store at a position whose tokens are not known yet."""
    key_length: int = 0
    """Number of tokens for which the key was read. A preempted request replays its answer too."""
    shares_context: bool = False
    """True if other requests may hold the store of the request's context, and evictions give way to
    requests that hold the same blocks."""
    pending_store: "PublishedStore | None" = None
    """Published store that the request starts with; None once the workers have been informed."""
    replay_store: "PublishedStore | None" = None
    """Store that a replay (an internal request) starts with; None for all other requests."""
    audited: bool = False
    """True if the evictions are replayed, so that the queries before them must be computed."""
    replay_block_ids: frozenset[int] = frozenset()
    """Ids of the blocks that a replay of the last eviction holds."""
    base_store: "PublishedStore | None" = None
    """Published store that the following tokens are computed over; None after the next eviction."""
    reused_store: "PublishedStore | None" = None
    """Published store that the request started with, also after its next eviction."""
    suffix_published: int = 0
    """Number of tokens up to which full blocks after that store were published."""
    publish_at: int = 0
    """Length at which the next step can publish a block by hash; steps that end before it skip
    publishing."""
    prefix_found: int = 0
    """Number of tokens that were found in the prefix cache at the last admission; 0 if the request
    started with a published store."""
    admitted_at: int | None = None
    """First position of the step that admits the request; None once that step is planned."""
    replayed_from: int = sys.maxsize
    """First position that is computed again after a load by a connector; later than every position
    if nothing was loaded."""
    replayed_until: int = 0
    """First position that was neither found in the cache nor loaded, if any is computed again."""
    ring: int | None = None
    recorded_from: int = 0
    """First position with its query in the ring. All positions from there to the last scheduled
    token are recorded."""
    evicted_at: int = 0
    """Length at the last eviction."""
    expected_gain: int = 0
    """Blocks that a requested eviction under pressure will return, until they are returned; 0 if
    none is requested."""
    pressure_order: int = 0
    """Sequence number of the last eviction under pressure, among those of all requests; 0 if there
    was none."""
    evicted: bool = False
    """True if the request was evicted at least once, or started with the store of another one,
    preemptions included."""
    hit_capped: bool = False
    """True if a prefix-cache hit of the request was shortened."""
    prefill_end: int = 0
    """Length of the prefill in tokens; 0 for a request that never evicts."""
    next_eviction: int = sys.maxsize
    """Length at which the next eviction of any group is due."""
    quiet_until: int = sys.maxsize
    """Steps that end at or before this length neither evict nor compute a query that an eviction
    needs."""
    computed_valid: int | None = None
    """First token that was computed over an evicted cache; None before the first eviction."""
    version: int = 0
    """Counter that changes with every eviction that is planned, deferred or requested."""
    forecast: "tuple[int, list[tuple[int, int, int, int]]] | None" = None
    """Contribution to the forecast, with the version for which it was computed."""
    _begun_with: int = -1
    request_id: str = field(init=False)
    positions: FixedPositions | None = field(init=False)
    """The positions of evictions, if they depend on tokens alone; otherwise None."""

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        every = any(rule.every for rule in self.rules.values())
        self.positions = fixed_positions(self.rules) if every else None

    @property
    def evicts_on_tokens(self) -> bool:
        """True if the positions of evictions depend on tokens alone."""
        return self.positions is not None

    @property
    def evicts(self) -> bool:
        return bool(self.rules)

    @property
    def holds_blocks(self) -> bool:
        return self.phase is not Phase.WAITING

    @property
    def on_demand(self) -> bool:
        """True if the request evicts under pressure only."""
        return self.evicts and self.options.when == "pressure"

    @property
    def must_evict(self) -> bool:
        """True if evictions run even if other requests share the blocks.

        If prompts evict while they are prefilled, requests with a common prefix that all defer
        their evictions because of each other may not fit, and could be preempted together forever.
        """
        if self.evicts_on_tokens:
            return True
        inside = any(t.rule.prefill_stride for t in self.progress.values())
        return inside and self.request.num_preemptions > 0

    @property
    def makes_links(self) -> bool:
        """True if what the request keeps is a store of its chain, even if it is not published."""
        return self.chain is not None and self.on_chain

    @property
    def waits_its_turn(self) -> bool:
        """True if the request computes nothing until a step has room for its eviction."""
        return self.shares_context or self.evicts_on_tokens

    @property
    def reusable(self) -> "list[ShareKey]":
        """Keys of the stores that the request could start with, in the order of their points."""
        if self.chain is None:
            return [] if self.store_key is None else [self.store_key]
        return self.chain.keys[: self.chain.before(self.request.num_tokens)]

    def begin(self, reuse: "PublishedStore | None" = None) -> None:
        """Compute the progress that an admission now would start with.

        A preempted request replays its answer too, so its prefill may have grown.

        Args:
            reuse: Published store that the request would start with, or None.

        """
        assert self.phase is Phase.WAITING
        self.replayed_from, self.replayed_until = sys.maxsize, 0
        known = self._begun_with == self.request.num_tokens and self.pending_store is None
        self.pending_store = self.reused_store = reuse
        self.links, self.on_chain, self.last_store = 0, True, None
        if reuse is not None and self.chain is not None:
            self.links, self.last_store = self.chain.before(reuse.key.point) + 1, reuse
            self.progress = self.chain.progress_after(self.links, self.request.num_tokens)
        elif not known:
            self.progress = self.fresh_progress()
            self._begun_with = self.request.num_tokens
        if reuse is not None and self.chain is None:
            reuse.advance(self.progress)
        if reuse is not None or not known:
            self.refresh()
        if reuse is not None:
            self.compute_over(reuse)

    def share_context(self) -> None:
        """Record that other requests may hold what the request keeps of its context."""
        if not self.shares_context:
            self.shares_context = True
            self.progress = self.fresh_progress()
            self.refresh()

    def fresh_progress(self) -> dict[int, EvictionProgress]:
        """Return the progress of every group with nothing computed."""
        prompt, replay = self.request.num_prompt_tokens, self.request.num_tokens
        return {
            group: EvictionProgress(
                rule,
                prompt,
                replay,
                self.options.at,
                self.max_length,
                self.on_demand,
                shares_context=self.shares_context,
            )
            for group, rule in self.rules.items()
        }

    def return_to_waiting(self) -> None:
        """Return the request to WAITING with nothing computed, because its blocks are freed."""
        self.phase, self._begun_with = Phase.WAITING, -1
        self.pending_store = self.base_store = self.reused_store = self.admitted_at = None
        self.unpublished = self.last_store = None
        self.suffix_published = self.publish_at = self.evicted_at = 0
        self.expected_gain = self.pressure_order = 0

    def take_window(self) -> "list[KVCacheBlock]":
        """Return the blocks that are kept for a store, and forget them."""
        blocks, self.kept_window = self.kept_window, []
        return blocks

    def refresh(self) -> None:
        self.version += 1
        progress = self.progress.values()
        self.prefill_end = max((t.prefill_end for t in progress), default=0)
        dues = [
            (t.next_eviction, t.next_eviction - t.rule.window)
            for t in progress
            if t.next_eviction is not None
        ]
        self.next_eviction = min((due for due, _ in dues), default=sys.maxsize)
        self.quiet_until = min((near for _, near in dues), default=sys.maxsize)
        valid = [t.computed_valid for t in progress if t.computed_valid is not None]
        self.computed_valid = min(valid, default=None)

    def compute_over(self, store: "PublishedStore") -> None:
        """Record that the following tokens are computed over a published store."""
        self.base_store, self.suffix_published, self.publish_at = store, store.key.point, 0

    def request_eviction(self, dues: Mapping[int, int]) -> None:
        """Schedule an eviction on demand in each group, at the group's length."""
        for group, due in dues.items():
            self.progress[group].schedule_on_demand(due)
        self.refresh()

    def defer(self, group: int, end: int) -> None:
        """Defer the eviction of one group to its next interval."""
        self.progress[group].defer(end)
        self.refresh()

    def evict(self, group: int, end: int) -> tuple[int, int]:
        """Advance the progress of one group; return the old and the new tail start."""
        tail_starts = self.progress[group].evict(end)
        self.base_store, self.evicted_at = None, end
        self.refresh()
        return tail_starts

    def observes(self, end: int) -> bool:
        """Return whether a step that ends at ``end`` computes queries that a group will need."""
        return end > self.quiet_until

    @property
    def context_end(self) -> int:
        """Tokens of the context that the request names, which is a part of its prompt; 0 for none.

        What follows is asked about the context, and is not known at an eviction inside it. A point
        one token before the end names no context: another server answers such a prompt. Evictions
        at fixed positions do not depend on what follows, so all that comes is a context.
        """
        if self.evicts_on_tokens:
            return sys.maxsize
        at = self.options.at
        return at if at is not None and at < self.request.num_prompt_tokens - 1 else 0

    def reads_window(self, end: int) -> bool:
        """Return whether an eviction at ``end`` is scored by an observation window.

        A policy with an optional window does not read it inside a context that the request names:
        its queries are those of the context, and what is asked later differs.
        """
        if self.needs.window == "optional":
            return end > self.context_end
        return self.needs.window == "required"

    def in_prefill(self, end: int) -> bool:
        """Return whether a step that ends at ``end`` belongs to the prefill."""
        return end <= self.prefill_end

    def coming_groups(self, end: int) -> list[int]:
        """Return the groups that need queries of the step for their next eviction."""
        return [group for group, t in self.progress.items() if t.observes(end)]

    def due_groups(self, end: int) -> list[int]:
        """Return the groups that are due to evict with the step."""
        return [group for group, t in self.progress.items() if t.is_due(end)]

    def last_step(self, end: int) -> bool:
        """Return whether the request certainly ends with the step."""
        return end + 1 >= self.max_length

    @property
    def accumulates_attention(self) -> bool:
        """True if the attention of the following queries is accumulated for a later eviction."""
        if not self.needs.every_query:
            return False
        return self.quiet_until < sys.maxsize or any(
            t.can_evict_on_demand for t in self.progress.values()
        )

    @property
    def has_eviction_points(self) -> bool:
        """True if chunks of prefill end at eviction points."""
        return any(t.has_eviction_points for t in self.progress.values())

    def next_chunk_end(self, start: int) -> int | None:
        """Return the first eviction point after ``start`` at which a chunk must end; None if there
        is none.

        A deferred eviction can run at every later point. The point that a request asked for counts
        even if its eviction was deferred, so that requests that wait for its store are informed.
        """
        points = [t.next_chunk_end(start) for t in self.progress.values()]
        return min((point for point in points if point is not None), default=None)

    def clip_chunk(self, start: int, end: int) -> int:
        """Return the end of a chunk of prefill over [start, end), moved back to an eviction point
        if there is one.

        The blocks of an eviction are free once its step was processed. A request that cannot
        continue without them would be preempted and return to the same point forever, so it waits
        instead.
        """
        if not self.has_eviction_points:
            return end
        if self.in_prefill(end) and any(held.replaced_in_flight for held in self.holdings.values()):
            return start
        point = self.next_chunk_end(start)
        return end if point is None else min(end, point)

    def evicts_inside(self, end: int) -> bool:
        """Return whether a chunk that ends at ``end`` evicts inside a prompt that evicts in
        intervals."""
        inside = end < self.prefill_end and end >= self.next_eviction
        return inside and any(t.rule.prefill_stride for t in self.progress.values())

    def max_drafts(self, num_tokens: int) -> int:
        """Return the maximum number of draft tokens that the next step of a decoding request may
        verify.

        A rejected draft leaves its query in the ring and its attention in the accumulated sums. The
        next step overwrites the query, if that step comes before the eviction; the sums are never
        corrected. A step may therefore end where the needed queries begin, but not extend beyond
        it.

        Args:
            num_tokens: Tokens of the request, including the one that the step computes.

        """
        if self.next_eviction == sys.maxsize:
            return sys.maxsize
        if self.needs.every_query:
            return 0
        if num_tokens <= self.quiet_until:
            return self.quiet_until - num_tokens
        window = min(t.rule.window for t in self.progress.values())
        return max(0, min(self.next_eviction - 1 - num_tokens, window - 1))

    def cacheable(self, num_tokens: int) -> int:
        """Return how many of the first ``num_tokens`` tokens may be published by hash."""
        valid = self.computed_valid
        return num_tokens if valid is None or valid > num_tokens else valid

    @property
    def hit_cap(self) -> int:
        """Maximum number of tokens that a prefix-cache hit may cover.

        The window that scores must be computed, and so must all tokens after an eviction point. If
        the attention of every query counts, no query may be skipped. The cap also applies to a
        policy that works without a window: with the window it sees a question at the end of the
        prompt, at the cost of two blocks.
        """
        if self.accumulates_attention:
            return 0
        return min([self.request.num_tokens, *(t.hit_cap for t in self._reading)])

    @property
    def load_cap(self) -> int:
        """Maximum number of tokens that are not computed again after a load by a connector."""
        if self.accumulates_attention:
            return 0
        return min([self.request.num_tokens, *(t.load_cap for t in self._reading)])

    @property
    def _reading(self) -> list[EvictionProgress]:
        """The progress of the groups that bound how many tokens may be loaded or reused."""
        return [
            t
            for t in self.progress.values()
            if (t.has_eviction_points and t.next_prefill_eviction is not None)
            or self.needs.window != "none"
            or self.audited
        ]

    @property
    def reuse_cap(self) -> int:
        """Maximum number of tokens that may come from a published store and the blocks computed
        over it.

        The window of the next eviction must be computed, and at least one token in any case.
        """
        caps = [t.hit_cap for t in self.progress.values()]
        return min([self.request.num_tokens - 1, *caps])

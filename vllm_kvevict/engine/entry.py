"""What the engine core knows about the eviction of one admitted request."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_kvevict.schedule.timeline import RequestTimeline

if TYPE_CHECKING:
    from vllm_kvevict.engine.shared_store import SharedStore


@dataclass
class Entry:
    """One admitted request. ``timelines`` has one entry per evictable KV-cache group.

    What the scheduler asks about every request in every step is kept as plain numbers.
    """

    timelines: dict[int, RequestTimeline]
    """By KV-cache group; empty for a request that switched eviction off."""
    policy: str
    needs_window: bool
    protect_first: int = 0
    context: int | None = None
    """Tokens of the context that the request prepares for others; None for requests of clients."""
    counts_attention: bool = False
    """Whether the policy adds up the attention of every query."""
    on_demand: bool = False
    """Whether the request evicts under pressure only."""
    turn: int = 0
    """Number of its last eviction under pressure, among those of all requests; 0 for none."""
    ring: int | None = None
    recorded_from: int = 0
    """First position whose query is in the ring; contiguous up to the last scheduled token."""
    prefill_end: int = field(init=False)
    """Tokens of the prefill; 0 for a request that switched eviction off."""
    due: int = field(init=False)
    """Length at which the next eviction of any group is due."""
    quiet_until: int = field(init=False)
    """Steps that end here or before neither evict nor compute a query that is needed."""
    computed_valid: int | None = field(init=False)
    """Tokens from here on were computed over an evicted cache; None before any eviction."""
    published: int = 0
    """Tokens up to which blocks were published by hash."""
    shared: "SharedStore | None" = None
    """The published store over which the request computes; None once it has evicted again."""
    behind: int = 0
    """Tokens up to which full blocks were published behind that store."""

    def __post_init__(self) -> None:
        self.prefill_end = max((t.prefill_end for t in self.timelines.values()), default=0)
        self._refresh()

    def _refresh(self) -> None:
        timelines = self.timelines.values()
        dues = [(t.due, t.due - t.timeline.window) for t in timelines if t.due is not None]
        self.due = min((due for due, _ in dues), default=sys.maxsize)
        self.quiet_until = min((near for _, near in dues), default=sys.maxsize)
        valid = [t.computed_valid for t in timelines if t.computed_valid is not None]
        self.computed_valid = min(valid, default=None)

    def observes(self, end: int) -> bool:
        """Whether the step that ends at ``end`` computes queries some group will need."""
        return end > self.quiet_until

    @property
    def accumulates(self) -> bool:
        """Whether the attention of the coming queries is added up: an eviction will read it."""
        if not self.counts_attention:
            return False
        return self.quiet_until < sys.maxsize or any(t.waits for t in self.timelines.values())

    @property
    def stops(self) -> bool:
        """Whether chunks of prefill end at eviction points."""
        return any(t.stops for t in self.timelines.values())

    def stop(self, start: int) -> int | None:
        """The first eviction point behind ``start`` where a chunk must end; None for none.

        An eviction that was postponed has its chance at every later one. A request's own point is
        one, whether its eviction was put off or not: who waits for its store then knows.
        """
        points = [t.stop(start) for t in self.timelines.values()]
        return min((point for point in points if point is not None), default=None)

    def most_drafts(self, num_tokens: int) -> int:
        """Draft tokens that the coming step of a decoding request may verify.

        A rejected draft has left its query in the ring and its attention in the sums. The ring
        gets the right query with the next step, if that comes before the eviction; sums never do.
        A step may only reach up to where queries are needed, not across.

        Args:
            num_tokens: Tokens of the request, the one that the step computes included.

        """
        timelines = self.timelines.values()
        due = min((t.due for t in timelines if t.due is not None), default=None)
        if due is None:
            return sys.maxsize
        if self.counts_attention:
            return 0
        if num_tokens <= self.quiet_until:
            return self.quiet_until - num_tokens
        window = min(t.timeline.window for t in timelines)
        return max(0, min(due - 1 - num_tokens, window - 1))

    def cacheable(self, num_tokens: int) -> int:
        """How many of the first ``num_tokens`` tokens may be published by hash."""
        valid = self.computed_valid
        return num_tokens if valid is None or valid > num_tokens else valid

    def in_prefill(self, end: int) -> bool:
        """Whether a step that ends at ``end`` belongs to the prefill."""
        return end <= self.prefill_end

    def coming_groups(self, end: int) -> list[int]:
        """Groups whose next eviction needs queries of the step that ends at ``end``."""
        return [group for group, t in self.timelines.items() if t.observes(end)]

    def due_groups(self, end: int) -> list[int]:
        """Groups whose eviction is due with the step that ends at ``end``."""
        return [group for group, t in self.timelines.items() if t.is_due(end)]

    def take(self, shared: "SharedStore") -> None:
        """Stand where the evictions at a published store's point would have left the request."""
        point = shared.key.point
        for timeline in self.timelines.values():
            if timeline.is_due(point):
                timeline.evict(point)
        self._refresh()
        self.hold(shared)

    def hold(self, shared: "SharedStore") -> None:
        """Note that what follows is computed over a published store."""
        self.shared, self.behind = shared, shared.key.point

    def call(self, dues: Mapping[int, int]) -> None:
        """Let groups of a request that evicts on demand do so, each at its length."""
        for group, due in dues.items():
            self.timelines[group].call(due)
        self._refresh()

    def defer(self, group: int, end: int) -> None:
        """Put one group's eviction off to its next interval."""
        self.timelines[group].defer(end)
        self._refresh()

    def evict(self, group: int, end: int) -> tuple[int, int]:
        """Advance one group's timeline; returns the old and the new tail start."""
        tail_starts = self.timelines[group].evict(end)
        self.shared = None
        self._refresh()
        return tail_starts

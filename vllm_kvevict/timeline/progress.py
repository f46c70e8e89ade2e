"""When one request evicts, and how many blocks it holds: pure arithmetic on lengths.

Units as in :mod:`~vllm_kvevict.timeline.rule`.
"""

import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache

from vllm_kvevict.timeline.rule import EvictionRule, blocks_for


@dataclass
class EvictionProgress:
    """Where one request stands in its schedule, from admission to finish or preemption.

    Args:
        timeline: The rule.
        prompt_len: Tokens of the prompt.
        prefill_end: The prompt, or everything that is replayed after a preemption.
        requested_point: The eviction point that the request asked for, in (0, prompt_len];
            None for the end of prefill.
            Tokens from there on are prefilled over the evicted cache.
        max_length: Length at which the request ends at the latest, its last sampled token included;
            None where it is not known. What could only evict with the last step never does.
        on_demand: Whether the request evicts only when it is called, and not at fixed lengths.

    """

    timeline: EvictionRule
    prompt_len: int
    prefill_end: int
    requested_point: int | None = None
    max_length: int | None = None
    on_demand: bool = False
    tail_start: int = 0
    store_blocks: int = 0
    """Blocks of its store; 0 before the first eviction."""
    no_eviction_before: int = 0
    """Length before which a request that waits for a call is left alone."""
    next_eviction: int | None = field(init=False)
    next_prefill_eviction: int | None = field(init=False)
    """E, where prefill evicts; None for a request too short for it."""
    computed_valid: int | None = None
    """Tokens from here on were computed over an evicted cache; None before the first eviction."""

    def __post_init__(self) -> None:
        rule = self.timeline
        self._floor = rule.store_blocks(
            self.prompt_len if self.requested_point is None else self.requested_point
        )
        self.next_prefill_eviction = self.next_eviction = None
        if self.on_demand:
            return
        self.next_prefill_eviction = self.next_eviction = self._inside(0)
        if self.next_eviction is None and rule.stride:
            # Too short to evict: joins in once it has outgrown its budget by the interval.
            budget = self.wanted(self.context_end) * rule.block_size + rule.protected
            start = max(budget + rule.stride, self.prefill_end + 1)
            self.next_eviction = self._first(start, rule.stride, rule.stride // rule.block_size)

    @property
    def context_end(self) -> int:
        """Where the context ends: the request's own eviction point, or the end of prefill."""
        return self.prefill_end if self.requested_point is None else self.requested_point

    @property
    def has_eviction_points(self) -> bool:
        """Whether chunks of prefill end at the request's eviction points."""
        return self.requested_point is not None or self.timeline.prefill_stride > 0

    def next_chunk_end(self, start: int) -> int | None:
        """Where a chunk of prefill from ``start`` on must end; None for nowhere.

        An eviction that was put off has its chance at every later point, the request's own
        included.
        """
        waits = self.next_prefill_eviction == self.next_eviction or not self.timeline.prefill_stride
        if not self.has_eviction_points or self.next_prefill_eviction is None or not waits:
            return None
        if self.next_prefill_eviction > start:
            return self.next_prefill_eviction
        later = self.timeline.next_point(start), self.requested_point
        return min((point for point in later if point is not None and point > start), default=None)

    @property
    def points(self) -> tuple[int, ...]:
        """Every position short of the end of prefill at which it evicts, asked before the first."""
        request, found = replace(self), []
        while request.next_eviction is not None and request.next_eviction < self.prefill_end:
            found.append(request.next_eviction)
            request.evict(request.next_eviction)
        return tuple(found)

    def _inside(self, n: int) -> int | None:
        """Where prefill evicts next behind ``n``, its end included; None where it does not."""
        last = self.context_end if n < self.context_end else self.prefill_end
        point = self.timeline.next_point(n)
        while point is not None and point < last:
            if self.gain(point) > 0:
                return point
            point += self.timeline.prefill_stride
        if n >= self.context_end:
            return None
        return self._before_end(last) if self.gain(last) > 0 else self._inside(last)

    def wanted(self, n: int) -> int:
        """Blocks of the store that an eviction at ``n`` fills.

        A share is one of ``n`` tokens; a budget in tokens is shared between groups of layers by
        the prompt's length. A store never shrinks: protected tokens that fit once fit for good.
        """
        if self.timeline.budget_share is None:
            return self._floor
        return max(self._floor, self.timeline.store_blocks(n))

    def share(self, n: int) -> float:
        """Part of the tokens that an eviction at ``n`` keeps, on average over all layers.

        Of the context where ``n`` is inside of it: what is scored early is compared at its end.
        """
        length = max(n, self.context_end)
        return self.timeline.budget(length) / length

    def gain(self, n: int) -> int:
        """Blocks that an eviction at ``n`` gives back, less those that it takes."""
        tail = (self.timeline.tail_start(n) - self.tail_start) // self.timeline.block_size
        return tail + self.store_blocks - self.wanted(n)

    def _first(self, start: int, pause: int, gain: int = 1) -> int | None:
        """A length from ``start`` on at which an eviction gains so many blocks; None for never.

        A share grows with the sequence, so it may be late or never that something can go. Looked
        for in pauses that double.
        """
        last, n = sys.maxsize if self.max_length is None else self.max_length, start
        while n < last and self.gain(n) < gain:
            n, pause = n + pause, 2 * pause
        return self._before_end(n) if n < last else None

    def _before_end(self, n: int) -> int | None:
        """``n``, or None where a step that ends there is the request's last."""
        return n if self.max_length is None or n + 1 < self.max_length else None

    def on_demand_length(self, start: int, end: int, window: int) -> int | None:
        """Where a request that is called would evict; None where that gives back nothing.

        At the end of the context or of the prefill if it has not come there, else as soon as its
        window can be recorded.

        Args:
            start: First position of the coming step.
            end: Where that step ends.
            window: Queries that must be recorded until then; 0 for policies without a window.

        """
        due = max(start + window, end)
        if due <= self.context_end:
            due = self.context_end
        elif end <= self.prefill_end:
            due = max(due, self.prefill_end)
        return self._before_end(due) if self.gain(due) > 0 else None

    def schedule_on_demand(self, due: int) -> None:
        """Let a request that evicts on demand do so at ``due``, which :meth:`turn` gave."""
        self.next_eviction = due
        self.next_prefill_eviction = due if due <= self.prefill_end else None

    @property
    def can_evict_on_demand(self) -> bool:
        """Whether the request may still be called: short of a preemption, at any length."""
        return self.on_demand and self.no_eviction_before < sys.maxsize

    @property
    def evicted(self) -> bool:
        return self.computed_valid is not None

    @property
    def hit_cap(self) -> int:
        """Most tokens that a prefix-cache hit may cover, asked before anything is evicted.

        The queries of the last w tokens before the first eviction must be computed, also where
        it comes soon after the prefill.
        """
        if self.next_eviction is None:
            return self.prefill_end
        rule = self.timeline
        # Fewer tokens than the window may be protected.
        window = max(0, self.next_eviction - rule.window) // rule.block_size * rule.block_size
        return min(self.prefill_end, rule.tail_start(self.next_eviction), window)

    def is_due(self, n: int) -> bool:
        """Whether the step that ends at ``n`` should evict."""
        return self.next_eviction is not None and n >= self.next_eviction and self.gain(n) > 0

    def observes(self, n: int) -> bool:
        """Whether the step that ends at ``n`` computes queries of the coming window."""
        return self.next_eviction is not None and n > self.next_eviction - self.timeline.window

    def evict(self, n: int) -> tuple[int, int]:
        """Record the eviction of the step that ends at ``n``.

        Returns:
            The old and the new tail start; blocks between them are freed once the step is
            processed.

        """
        assert self.is_due(n), f"no eviction is due at {n} (due {self.next_eviction})"
        self._floor = self.store_blocks = self.wanted(n)
        old, self.tail_start = self.tail_start, self.timeline.tail_start(n)
        if self.computed_valid is None:
            self.computed_valid = n
        stride = self.timeline.stride
        if self.on_demand:
            self.next_eviction, self.no_eviction_before = (
                None,
                n + stride if stride else sys.maxsize,
            )
            return old, self.tail_start
        if not self._stop_inside(n):
            # Nowhere else in prefill, so that nothing depends on how it is cut into chunks.
            self.next_eviction = (
                self._first(max(n + stride, self.prefill_end), stride) if stride else None
            )
        return old, self.tail_start

    def _stop_inside(self, n: int) -> bool:
        """Let the next eviction behind ``n`` be one of prefill, if prefill evicts once more."""
        due = self._inside(n)
        if due is not None:
            self.next_eviction = self.next_prefill_eviction = due
        return due is not None

    def looks_before(self, point: int) -> bool:
        """Whether an eviction behind one at ``point`` looks at queries before it."""
        rule, due = self.timeline, self.next_eviction
        if self.is_due(point):
            later = replace(self)
            later.evict(point)
            due = point + rule.stride if rule.stride else None
            if later.next_prefill_eviction != point:
                due = later.next_prefill_eviction
        return due is not None and due - rule.window < point

    def defer(self, n: int) -> None:
        """Try the coming eviction, or that of the step that ends at ``n``, in the next interval.

        Where nothing evicts in decode, after four windows: a slot of the observation rings is
        then held a quarter of the time at most.
        """
        rule = self.timeline
        pause = rule.stride or blocks_for(4 * rule.window, rule.block_size) * rule.block_size
        if self.on_demand:
            self.next_eviction, self.no_eviction_before = None, n + pause
        elif not self._stop_inside(max(n, self.next_eviction or 0)):
            self.next_eviction = self._first(max(n + pause, self.prefill_end), pause)

    def least_blocks(self, n: int) -> int:
        """Blocks that suffice up to length ``n`` where nobody shares them and evictions run.

        They find room in the request's own blocks then. In decode a step in flight adds a block
        before an eviction's are free; in prefill the next chunk waits for them where it stops.
        """
        return _least_blocks(
            self.timeline,
            self.prompt_len,
            self.prefill_end,
            self.requested_point,
            self.max_length,
            self.on_demand,
            n,
        )


@lru_cache(maxsize=4096)
def _least_blocks(
    rule: EvictionRule,
    prompt_len: int,
    prefill_end: int,
    requested_point: int | None,
    max_length: int | None,
    on_demand: bool,
    n: int,
) -> int:
    """As :meth:`EvictionProgress.least_blocks`: asked in every step in which a prompt waits."""
    request = EvictionProgress(
        rule, prompt_len, prefill_end, requested_point, max_length, on_demand
    )
    bs, most, freed, store = rule.block_size, 0, 0, 0
    while request.next_eviction is not None and n >= request.next_eviction:
        due = request.next_eviction
        in_flight = n > due and (due >= prefill_end or not request.has_eviction_points)
        most = max(most, blocks_for(due, bs) - freed + store + in_flight)
        freed, store = request.evict(due)[1] // bs, request.store_blocks
    return max(most, blocks_for(n, bs) - freed + store)

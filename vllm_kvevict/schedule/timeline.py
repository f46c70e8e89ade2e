"""When a request evicts, and how many blocks it holds: pure arithmetic on lengths.

The engine core and the workers both read this module, so neither has to tell the other
how much is evicted. Nothing here imports torch or vLLM.

Units: every length and position is in tokens, every count in blocks of ``block_size``
tokens. ``n`` is the number of tokens whose keys are in the cache at the end of a step.
"""

import sys
from dataclasses import dataclass, field, replace

from vllm_kvevict.schedule.layers import Share


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks needed for ``tokens`` tokens."""
    return -(-tokens // block_size)


def _whole(tokens: float) -> int:
    # Of 100 tokens 29% are 29, although 100 * 0.29 is a hair less.
    return int(round(tokens, 6))


@dataclass(frozen=True)
class Timeline:
    """The eviction schedule of one group of layers (DESIGN section 2).

    Args:
        block_size: Tokens in a block.
        window: Observation window w; these last tokens are never evicted.
        interval: Decode steps between evictions; 0 evicts after prefill only.
        budget_tokens: Tokens kept per KV head, window included; None if a share is given.
        budget_share: Share of the tokens so far kept per KV head, in (0, 1]; None if tokens are
            given.
        least: Tokens per KV head that a share comes to at least.
        most: Tokens per KV head that a share comes to at most; None for no bound.
        share: What the group keeps relative to the mean over all layers, which the budget is;
            None where every layer has the same.
        context: Tokens of a context that is prepared: an eviction further on, behind what reads
            it, takes and keeps what one at its end would. None for evictions where they are.
        prefill_interval: Tokens of prefill between evictions inside it; 0 for none.

    Raises:
        ValueError: A length is out of range, not exactly one budget is given, or prefill evicts in
            intervals to a share.

    """

    block_size: int
    window: int
    interval: int
    budget_tokens: int | None = None
    budget_share: float | None = None
    least: int = 0
    most: int | None = None
    share: Share | None = None
    context: int | None = None
    prefill_interval: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.window < 1 or min(self.interval, self.prefill_interval) < 0:
            raise ValueError("block_size and window must be at least 1, intervals at least 0")
        if (self.budget_tokens is None) == (self.budget_share is None):
            raise ValueError("give exactly one of budget_tokens and budget_share")
        if self.prefill_interval and self.budget_tokens is None:
            raise ValueError("prefill_interval needs a budget in tokens")

    @property
    def stride(self) -> int:
        """Decode steps between two evictions: the interval in whole blocks, 0 for never.

        The tail start moves by whole blocks, so a shorter interval would find nothing to evict.
        """
        return blocks_for(self.interval, self.block_size) * self.block_size

    @property
    def prefill_stride(self) -> int:
        """Tokens of prefill between two evictions: the interval in whole blocks, 0 for none."""
        return blocks_for(self.prefill_interval, self.block_size) * self.block_size

    def next_point(self, n: int) -> int | None:
        """The first position behind ``n`` at which every prefill evicts; None for none.

        They begin where the mean budget and one interval are full, and are the same for all groups
        of layers, so that a chunk ends for all of them.
        """
        stride = self.prefill_stride
        if not stride:
            return None
        kept = replace(self, share=None).store_blocks(n)
        first = (kept + blocks_for(self.window, self.block_size)) * self.block_size + stride
        return first + max(0, (n - first) // stride + 1) * stride

    def most_blocks(self, longest: int) -> int:
        """Blocks that suffice for any one request of ``longest`` tokens, prompt and answer.

        As many as it has where it does not evict in both: an answer may be all of it.
        """
        whole = blocks_for(longest, self.block_size)
        if not self.prefill_stride or not self.stride:
            return whole
        bs, most = self.block_size, replace(self, share=None).store_blocks(0)
        if self.share is not None:
            # Up to here a group may have more than in the longest prompt.
            bend = self.window + max(*self.share.shares, self.share.steepest or 0) * self.budget(0)
            lengths = range(self.window, min(longest, int(bend) + bs) + bs, bs)
            most = max([most, *(self.store_blocks(length) for length in lengths)])
        between = blocks_for(self.window + max(self.stride, self.prefill_stride), bs)
        return min(whole, most + between + 2)

    def budget(self, length: int) -> int:
        """Tokens kept per KV head of ``length`` tokens, window included: the mean over all layers.

        ``length`` counts all tokens that were computed, whatever earlier evictions took.
        """
        if self.budget_tokens is not None:
            return self.budget_tokens
        assert self.budget_share is not None
        tokens = max(self.least, _whole(length * self.budget_share))
        return tokens if self.most is None else min(self.most, tokens)

    def store_blocks(self, length: int) -> int:
        """S, the blocks of the store that an eviction at ``length`` tokens fills.

        A layer of the group keeps S pages per KV head on average.
        """
        length = self._in_context(length)
        beside = self.budget(length) - self.window
        if self.share is None:
            return max(1, beside // self.block_size)
        return self.share.blocks(beside, length - self.window, self.block_size)

    def tail_start(self, n: int) -> int:
        """T, the first position that stays in its positional block when evicting at ``n``."""
        n = self._in_context(n)
        return max(0, (n - self.window) // self.block_size * self.block_size)

    def _in_context(self, n: int) -> int:
        return n if self.context is None else min(n, self.context)

    def evictable(self, n: int) -> bool:
        """Whether a first eviction at ``n`` would free anything."""
        return self.tail_start(n) > self.store_blocks(n) * self.block_size


@dataclass
class RequestTimeline:
    """Where one request stands in its schedule, from admission to finish or preemption.

    Args:
        timeline: The rule.
        prompt_len: Tokens of the prompt.
        prefill_end: The prompt, or everything that is replayed after a preemption.
        at: The request's own eviction point in (0, prompt_len]; None for the end of prefill.
            Tokens from there on are prefilled over the evicted cache.
        ends: Length at which the request ends at the latest, its last sampled token included;
            None where it is not known. What could only evict with the last step never does.
        on_demand: Whether the request evicts only when it is called, and not at fixed lengths.

    """

    timeline: Timeline
    prompt_len: int
    prefill_end: int
    at: int | None = None
    ends: int | None = None
    on_demand: bool = False
    tail_start: int = 0
    store_blocks: int = 0
    """Blocks of its store; 0 before the first eviction."""
    not_before: int = 0
    """Length before which a request that waits for a call is left alone."""
    due: int | None = field(init=False)
    point: int | None = field(init=False)
    """E, where prefill evicts; None for a request too short for it."""
    computed_valid: int | None = None
    """Tokens from here on were computed over an evicted cache; None before the first eviction."""

    def __post_init__(self) -> None:
        rule = self.timeline
        self._floor = rule.store_blocks(self.prompt_len if self.at is None else self.at)
        self.point = self.due = None
        if self.on_demand:
            return
        self.point = self.due = self._inside(0)
        if self.due is None and rule.stride:
            # Too short to evict: joins in once it has outgrown its budget by the interval.
            budget = self.wanted(self.goal) * rule.block_size + rule.window
            start = max(budget + rule.stride, self.prefill_end + 1)
            self.due = self._first(start, rule.stride, rule.stride // rule.block_size)

    @property
    def goal(self) -> int:
        """Where the context ends: the request's own eviction point, or the end of prefill."""
        return self.prefill_end if self.at is None else self.at

    @property
    def stops(self) -> bool:
        """Whether chunks of prefill end at the request's eviction points."""
        return self.at is not None or self.timeline.prefill_stride > 0

    def stop(self, start: int) -> int | None:
        """Where a chunk of prefill from ``start`` on must end; None for nowhere.

        An eviction that was put off has its chance at every later point, the request's own
        included.
        """
        waits = self.point == self.due or not self.timeline.prefill_stride
        if not self.stops or self.point is None or not waits:
            return None
        if self.point > start:
            return self.point
        later = self.timeline.next_point(start), self.at
        return min((point for point in later if point is not None and point > start), default=None)

    @property
    def points(self) -> tuple[int, ...]:
        """Every position short of the end of prefill at which it evicts, asked before the first."""
        request, found = replace(self), []
        while request.due is not None and request.due < self.prefill_end:
            found.append(request.due)
            request.evict(request.due)
        return tuple(found)

    def _inside(self, n: int) -> int | None:
        """Where prefill evicts next behind ``n``, its end included; None where it does not."""
        last = self.goal if n < self.goal else self.prefill_end
        point = self.timeline.next_point(n)
        while point is not None and point < last:
            if self.gain(point) > 0:
                return point
            point += self.timeline.prefill_stride
        if n >= self.goal:
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

    def gain(self, n: int) -> int:
        """Blocks that an eviction at ``n`` gives back, less those that it takes."""
        tail = (self.timeline.tail_start(n) - self.tail_start) // self.timeline.block_size
        return tail + self.store_blocks - self.wanted(n)

    def _first(self, start: int, pause: int, gain: int = 1) -> int | None:
        """A length from ``start`` on at which an eviction gains so many blocks; None for never.

        A share grows with the sequence, so it may be late or never that something can go. Looked
        for in pauses that double.
        """
        last, n = sys.maxsize if self.ends is None else self.ends, start
        while n < last and self.gain(n) < gain:
            n, pause = n + pause, 2 * pause
        return self._before_end(n) if n < last else None

    def _before_end(self, n: int) -> int | None:
        """``n``, or None where a step that ends there is the request's last."""
        return n if self.ends is None or n + 1 < self.ends else None

    def turn(self, start: int, end: int, window: int) -> int | None:
        """Where a request that is called would evict; None where that gives back nothing.

        At the end of the context or of the prefill if it has not come there, else as soon as its
        window can be recorded.

        Args:
            start: First position of the coming step.
            end: Where that step ends.
            window: Queries that must be recorded until then; 0 for policies without a window.

        """
        due = max(start + window, end)
        if due <= self.goal:
            due = self.goal
        elif end <= self.prefill_end:
            due = max(due, self.prefill_end)
        return self._before_end(due) if self.gain(due) > 0 else None

    def call(self, due: int) -> None:
        """Let a request that evicts on demand do so at ``due``, which :meth:`turn` gave."""
        self.due = due
        self.point = due if due <= self.prefill_end else None

    @property
    def waits(self) -> bool:
        """Whether the request may still be called: short of a preemption, at any length."""
        return self.on_demand and self.not_before < sys.maxsize

    @property
    def evicted(self) -> bool:
        return self.computed_valid is not None

    @property
    def hit_cap(self) -> int:
        """Most tokens that a prefix-cache hit may cover, asked before anything is evicted.

        The queries of the last w tokens before the first eviction must be computed, also where
        it comes soon after the prefill.
        """
        if self.due is None:
            return self.prefill_end
        return min(self.prefill_end, self.timeline.tail_start(self.due))

    def is_due(self, n: int) -> bool:
        """Whether the step that ends at ``n`` should evict."""
        return self.due is not None and n >= self.due and self.gain(n) > 0

    def observes(self, n: int) -> bool:
        """Whether the step that ends at ``n`` computes queries of the coming window."""
        return self.due is not None and n > self.due - self.timeline.window

    def evict(self, n: int) -> tuple[int, int]:
        """Record the eviction of the step that ends at ``n``.

        Returns:
            The old and the new tail start; blocks between them are freed once the step is
            processed.

        """
        assert self.is_due(n), f"no eviction is due at {n} (due {self.due})"
        self._floor = self.store_blocks = self.wanted(n)
        old, self.tail_start = self.tail_start, self.timeline.tail_start(n)
        if self.computed_valid is None:
            self.computed_valid = n
        stride = self.timeline.stride
        if self.on_demand:
            self.due, self.not_before = None, n + stride if stride else sys.maxsize
            return old, self.tail_start
        if not self._stop_inside(n):
            # Nowhere else in prefill, so that nothing depends on how it is cut into chunks.
            self.due = self._first(max(n + stride, self.prefill_end), stride) if stride else None
        return old, self.tail_start

    def _stop_inside(self, n: int) -> bool:
        """Let the next eviction behind ``n`` be one of prefill, if prefill evicts once more."""
        due = self._inside(n)
        if due is not None:
            self.due = self.point = due
        return due is not None

    def defer(self, n: int) -> None:
        """Try the coming eviction, or that of the step that ends at ``n``, in the next interval.

        Where nothing evicts in decode, after four windows: a slot of the observation rings is
        then held a quarter of the time at most.
        """
        rule = self.timeline
        pause = rule.stride or blocks_for(4 * rule.window, rule.block_size) * rule.block_size
        if self.on_demand:
            self.due, self.not_before = None, n + pause
        elif not self._stop_inside(max(n, self.due or 0)):
            self.due = self._first(max(n + pause, self.prefill_end), pause)

    def least_blocks(self, n: int) -> int:
        """Blocks that suffice up to length ``n`` where nobody shares them and evictions run.

        They find room in the request's own blocks then. In decode a step in flight adds a block
        before an eviction's are free; in prefill the next chunk waits for them where it stops.
        """
        bs, most, freed, store = self.timeline.block_size, 0, 0, 0
        request = replace(self, tail_start=0, store_blocks=0, computed_valid=None)
        while request.due is not None and n >= request.due:
            due = request.due
            in_flight = n > due and (due >= self.prefill_end or not self.stops)
            most = max(most, blocks_for(due, bs) - freed + store + in_flight)
            freed, store = request.evict(due)[1] // bs, request.store_blocks
        return max(most, blocks_for(n, bs) - freed + store)

    def peak_blocks(self, n: int) -> int:
        """Most blocks the request can hold up to length ``n`` if no eviction is postponed.

        ``n`` counts scheduled tokens. Covers the prefill, the store, both stores while one is
        replaced, and the block that a step in flight adds before an eviction's blocks are free.
        """
        bs, peak, freed, store = self.timeline.block_size, 0, 0, 0
        if self.on_demand:
            return blocks_for(n, bs) + self.wanted(n)
        request = replace(self, tail_start=0, store_blocks=0, computed_valid=None)
        while request.due is not None and n >= request.due:
            due = request.due
            freed_next = request.evict(due)[1] // bs
            held = blocks_for(due, bs) - freed + store
            peak = max(peak, held + request.store_blocks + (n > due))
            freed, store = freed_next, request.store_blocks
        return max(peak, blocks_for(n, bs) - freed + store)

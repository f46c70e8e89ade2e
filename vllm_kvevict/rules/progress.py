"""The eviction progress of one request: when it evicts, and how many blocks it holds.

Pure arithmetic on lengths, in the units of :mod:`~vllm_kvevict.rules.rule`.
"""

import sys
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache

from vllm_kvevict.rules.rule import EvictionRule, blocks_for

LONGEST = 2**40
"""Maximum length in tokens of a request whose maximum is not known."""


@dataclass
class EvictionProgress:
    """Progress of one request through its eviction rule, from admission to the end or a preemption.

    Args:
        rule: The eviction rule.
        prompt_len: Tokens of the prompt.
        prefill_end: Length of the prompt, or of all tokens that are replayed after a preemption.
        requested_point: The eviction point that the request asked for, in (0, prompt_len]; None for
            the end of prefill. Tokens from there on are prefilled over the evicted cache.
        max_length: Maximum length of the request, its last sampled token included; None if unknown.
            An eviction that could only run with the last step never runs.
        on_demand: True if the request evicts only on demand, and not at fixed lengths.
        shares_context: True if other requests may hold what the request keeps of the tokens before
            the requested point. The next eviction counts these blocks as not freed, whether others
            hold them or not, so that it does not depend on other requests.

    """

    rule: EvictionRule
    prompt_len: int
    prefill_end: int
    requested_point: int | None = None
    max_length: int | None = None
    on_demand: bool = False
    tail_start: int = 0
    store_blocks: int = 0
    """Blocks of the store; 0 before the first eviction."""
    no_eviction_before: int = 0
    """Length before which the request is not evicted on demand."""
    shares_context: bool = False
    next_eviction: int | None = field(init=False)
    next_prefill_eviction: int | None = field(init=False)
    """E, the position at which prefill evicts; None if the request is too short for it."""
    computed_valid: int | None = None
    """First token that was computed over an evicted cache; None before the first eviction."""

    def __post_init__(self) -> None:
        rule = self.rule
        self.next_prefill_eviction = self.next_eviction = None
        if rule.every:
            # Nothing may depend on the length of the prompt: the next turn has a longer one.
            self._floor = 0
            self._schedule_point(0)
            return
        self._floor = rule.store_blocks(
            self.prompt_len if self.requested_point is None else self.requested_point
        )
        if self.on_demand:
            return
        self.next_prefill_eviction = self.next_eviction = self._inside(0)
        if self.next_eviction is None and rule.stride:
            # The prompt is too short to evict. The first eviction comes when the request exceeds
            # its budget by the interval.
            budget = self.wanted(self.context_end) * rule.page_tokens + rule.protected
            start = max(budget + rule.stride, self.prefill_end + 1)
            self.next_eviction = self._first(start, rule.stride, rule.stride // rule.block_size)

    def _schedule_point(self, n: int) -> None:
        """Schedule the eviction at the next position after ``n`` that depends on tokens alone."""
        last = LONGEST if self.max_length is None else self.max_length
        point = self.rule.next_point(n) if self.rule.may_free else None
        if point is not None and point + 1 < last:
            point = self.next_position(n, last) if n else _first_position(self.rule)
        self.next_eviction = point if point is not None and point + 1 < last else None
        self._limit_prefill()

    def next_position(self, n: int, last: int) -> int | None:
        """Return a position after ``n`` at which an eviction gains a block; None if there is none
        before ``last``.

        A budget that is a share may keep all tokens for long. The search therefore uses steps that
        grow, and then halves the last one until it is an eighth of the way, or a single interval.
        The result does not depend on ``last``, because equal tokens must have equal positions
        whatever the maximum length of a request.
        """
        first, stride = self.rule.next_point(n), self.rule.prefill_stride
        assert first is not None
        none, gains = -1, 0  # In intervals after the first position.
        while self.scheduled_gain(first + gains * stride) < 1:
            if first + gains * stride + 1 >= last:
                return None
            none, gains = gains, 4 * gains + 3
        while gains - none > max(1, gains // 8):
            middle = (none + gains) // 2
            if self.scheduled_gain(first + middle * stride) < 1:
                none = middle
            else:
                gains = middle
        return first + gains * stride

    def _limit_prefill(self) -> None:
        due = self.next_eviction
        self.next_prefill_eviction = due if due is not None and due <= self.prefill_end else None

    def replayed(self, prefill_end: int) -> "EvictionProgress":
        """Return this progress, of evictions that depend on tokens alone, for another prefill."""
        progress = copy(self)
        progress.prefill_end = prefill_end
        progress._limit_prefill()
        return progress

    @property
    def context_end(self) -> int:
        """End of the context: the eviction point that the request asked for, or the end of
        prefill."""
        return self.prefill_end if self.requested_point is None else self.requested_point

    @property
    def has_eviction_points(self) -> bool:
        """True if chunks of prefill end at the eviction points of the request."""
        return self.requested_point is not None or self.rule.prefill_stride > 0

    def next_chunk_end(self, start: int) -> int | None:
        """Return the position at which a chunk of prefill that starts at ``start`` must end; None
        for no limit.

        A deferred eviction can run at every later point, including the one that the request asked
        for.
        """
        is_next = self.next_prefill_eviction == self.next_eviction or not self.rule.prefill_stride
        if not self.has_eviction_points or self.next_prefill_eviction is None or not is_next:
            return None
        if self.next_prefill_eviction > start:
            return self.next_prefill_eviction
        later = self.rule.next_point(start), self.requested_point
        return min((point for point in later if point is not None and point > start), default=None)

    @property
    def points(self) -> tuple[int, ...]:
        """Positions before the end of prefill at which the request evicts; valid before the first
        eviction."""
        request, points = replace(self), []
        while request.next_eviction is not None and request.next_eviction < self.prefill_end:
            points.append(request.next_eviction)
            request.evict(request.next_eviction)
        return tuple(points)

    def _inside(self, n: int) -> int | None:
        """Return the next position after ``n`` at which prefill evicts, its end included; None if
        there is none."""
        rule = self.rule
        last = self.context_end if n < self.context_end else self.prefill_end
        if rule.prefill_stride:
            # The store of a budget in tokens does not depend on the length, so the first tail start
            # that gains a block is known. All points in question are on one side of a point of the
            # request's own.
            more = self.wanted(n) - self.store_blocks
            fills = self.tail_start + more * rule.page_tokens + rule.block_size
            store = 0 if self.may_share(n + 1) else self.store_blocks
            frees = self.first_freed(n + 1) + (1 + self.wanted(n) - store) * rule.block_size
            gains = max(fills, frees) + rule.protected
            point = rule.next_point(max(n, gains - 1))
            if point is not None and point < last:
                return point
        if n >= self.context_end:
            return None
        return self._before_end(last) if self.gain(last) > 0 else self._inside(last)

    def wanted(self, n: int) -> int:
        """Return the blocks of the store that an eviction at ``n`` fills.

        A share refers to ``n`` tokens. A budget in tokens is divided between groups of layers by
        the length of the prompt. A store never shrinks: protected tokens that fit once always fit.
        """
        rule = self.rule
        if rule.budget_share is None and not rule.every:
            return self._floor
        wanted = rule.store_blocks(n)
        if rule.may_keep_all:
            # Tokens that did not fill a page of an earlier store are missing.
            more = (rule.tail_start(n) - self.tail_start) // rule.page_tokens
            wanted = min(wanted, self.store_blocks + more)
        return max(self._floor, wanted)

    def share(self, n: int) -> float:
        """Return the share of the tokens that an eviction at ``n`` keeps, on average over all
        layers.

        Inside the context, the share refers to the whole context, since tokens that are scored
        early are compared at its end.
        """
        length = n if self.rule.every else max(n, self.context_end)
        return self.rule.budget(length) / length

    def gain(self, n: int) -> int:
        """Return the blocks that an eviction at ``n`` frees, less those that it takes.

        The survivors fill the pages of the store, so an eviction gains no more blocks than the
        tokens that it evicts would fill; unless the budget is a share of the memory, of which an
        eviction may free some without evicting a token.
        """
        rule, wanted, start = self.rule, self.wanted(n), self.rule.tail_start(n)
        freed = max(0, start - self.first_freed(n)) // rule.block_size
        freed += 0 if self.may_share(n) else self.store_blocks
        evicted = start - self.tail_start - (wanted - self.store_blocks) * rule.page_tokens
        if rule.may_keep_all and evicted >= 0:
            return freed - wanted
        return min(freed - wanted, evicted // rule.block_size)

    def scheduled_gain(self, n: int) -> int:
        """Return the gain of an eviction that is scheduled at ``n``; 0 if it should come later.

        A store grows by whole pages. Where a share of the memory has room for another page that the
        tail does not fill yet, the eviction comes when it does. Evictions before would each evict
        all that the tail has gained, so that the store would never grow.
        """
        grows_later = (
            self.evicted
            and self.rule.may_keep_all
            and self.store_blocks == self.wanted(n) < self.rule.store_blocks(n)
        )
        return 0 if grows_later else self.gain(n)

    def may_share(self, n: int) -> bool:
        """Return whether other requests may hold the store that an eviction at ``n`` replaces."""
        return self.shares_context and self.requested_point is not None and n > self.requested_point

    def first_freed(self, n: int) -> int:
        """Return the first token, at a block's start, that counts as freed by an eviction at
        ``n``."""
        if not self.may_share(n):
            return self.tail_start
        assert self.requested_point is not None
        size = self.rule.block_size
        return max(self.tail_start, blocks_for(self.requested_point, size) * size)

    def _first(self, start: int, pause: int, gain: int = 1) -> int | None:
        """Return a length from ``start`` on at which an eviction gains ``gain`` blocks; None for
        never.

        A share grows with the sequence, so evictions may begin late or never. The search uses steps
        that double. A request with a shared context evicts at the first of these lengths, in steps
        of ``pause``, because it may hold nearly two stores until then.
        """
        last, n = sys.maxsize if self.max_length is None else self.max_length, start
        step = pause
        while n < last and self.scheduled_gain(n) < gain:
            start, n, step = n, n + step, 2 * step
        while self.may_share(n) and n - start > pause:
            middle = start + (n - start) // pause // 2 * pause
            start, n = (middle, n) if self.scheduled_gain(middle) < gain else (start, middle)
        return self._before_end(n) if n < last else None

    def _before_end(self, n: int) -> int | None:
        """Return ``n``, or None if a step that ends there is the last one of the request."""
        return n if self.max_length is None or n + 1 < self.max_length else None

    def on_demand_length(self, start: int, end: int, window: int) -> int | None:
        """Return the length at which a request evicts on demand; None if that frees no block.

        This is the end of the context or of the prefill if the request has not reached it, else the
        earliest length with a recorded window.

        Args:
            start: First position of the next step.
            end: End of that step.
            window: Number of queries that must be recorded until then; 0 for policies without a
                window.

        """
        due = max(start + window, end)
        if due <= self.context_end:
            due = self.context_end
        elif end <= self.prefill_end:
            due = max(due, self.prefill_end)
        return self._before_end(due) if self.gain(due) > 0 else None

    def schedule_on_demand(self, due: int) -> None:
        """Schedule an eviction on demand at ``due``, as returned by :meth:`on_demand_length`."""
        self.next_eviction = due
        self.next_prefill_eviction = due if due <= self.prefill_end else None

    @property
    def can_evict_on_demand(self) -> bool:
        """True if the request may be evicted on demand. To avoid a preemption, this is possible at
        any length."""
        return self.on_demand and self.no_eviction_before < sys.maxsize

    @property
    def evicted(self) -> bool:
        return self.computed_valid is not None

    @property
    def hit_cap(self) -> int:
        """Maximum number of tokens that a prefix-cache hit may cover; valid before the first
        eviction.

        The queries of the last w tokens before the first eviction must be computed, even if it
        comes soon after the prefill.
        """
        if self.next_eviction is None:
            return self.prefill_end
        rule = self.rule
        # There may be fewer protected tokens than the window has.
        window = max(0, self.next_eviction - rule.window) // rule.block_size * rule.block_size
        return min(self.prefill_end, rule.tail_start(self.next_eviction), window)

    @property
    def load_cap(self) -> int:
        """Maximum number of tokens that are not computed again after a load by a connector.

        The load fills blocks of the request's own, so it may end inside one.
        """
        if self.next_eviction is None:
            return self.prefill_end
        return min(self.prefill_end, max(0, self.next_eviction - self.rule.window))

    def is_due(self, n: int) -> bool:
        """Return whether the step that ends at ``n`` should evict."""
        return self.next_eviction is not None and n >= self.next_eviction and self.gain(n) > 0

    def observes(self, n: int) -> bool:
        """Return whether the step that ends at ``n`` computes queries of the next window."""
        return self.next_eviction is not None and n > self.next_eviction - self.rule.window

    def evict(self, n: int) -> tuple[int, int]:
        """Record the eviction of the step that ends at ``n``.

        Returns:
            The old and the new tail start. The blocks between them are freed once the step was
            processed.

        """
        assert self.is_due(n), f"no eviction is due at {n} (due {self.next_eviction})"
        old = self.tail_start
        self.keep(n)
        self.shares_context &= n == self.requested_point
        stride = self.rule.stride
        if self.rule.every:
            self._schedule_point(n)
            return old, self.tail_start
        if self.on_demand:
            self.next_eviction = None
            self.no_eviction_before = n + stride if stride else sys.maxsize
            return old, self.tail_start
        if not self._stop_inside(n):
            # There are no other evictions in prefill, so that the result does not depend on its
            # chunks.
            self.next_eviction = (
                self._first(max(n + stride, self.prefill_end), stride) if stride else None
            )
        return old, self.tail_start

    def keep(self, n: int) -> None:
        """Record what an eviction at ``n`` keeps, without scheduling the next one."""
        self._floor = self.store_blocks = self.wanted(n)
        self.tail_start = self.rule.tail_start(n)
        if self.computed_valid is None:
            self.computed_valid = n

    def resume(
        self, tail_start: int, store_blocks: int, first: int | None, due: int | None
    ) -> None:
        """Continue after evictions that depend on tokens alone, of which the first was at ``first``
        and the next one is at ``due``."""
        self.tail_start, self._floor = tail_start, store_blocks
        self.store_blocks, self.computed_valid = store_blocks, first
        self.next_eviction = due

    def _stop_inside(self, n: int) -> bool:
        """Schedule the next eviction after ``n`` inside prefill; return False if prefill evicts no
        more."""
        due = self._inside(n)
        if due is not None:
            self.next_eviction = self.next_prefill_eviction = due
        return due is not None

    def looks_before(self, point: int) -> bool:
        """Return whether the eviction after one at ``point`` uses queries before ``point``."""
        rule, due = self.rule, self.next_eviction
        if self.is_due(point):
            later = replace(self)
            later.evict(point)
            due = point + rule.stride if rule.stride else None
            if later.next_prefill_eviction != point:
                due = later.next_prefill_eviction
        return due is not None and due - rule.window < point

    def defer(self, n: int) -> None:
        """Defer the next eviction, or the one of the step that ends at ``n``, to the next interval
        (:attr:`EvictionRule.pause`)."""
        self.shares_context &= self.evicted
        pause = self.rule.pause
        if self.rule.every:
            self._schedule_point(max(n, self.next_eviction or 0))
        elif self.on_demand:
            self.next_eviction, self.no_eviction_before = None, n + pause
        elif not self._stop_inside(max(n, self.next_eviction or 0)):
            self.next_eviction = self._first(max(n + pause, self.prefill_end), pause)

    def sufficient_blocks(self, n: int) -> int:
        """Return a number of blocks that suffices up to length ``n`` if no block is shared and
        evictions run; for budgets in tokens.

        Evictions then reuse the request's own blocks. In decode, a step in flight adds a block
        before those of an eviction are free; in prefill, the next chunk waits for them if chunks
        end at eviction points. The cost does not depend on ``n``.
        """
        return _sufficient_blocks(
            self.rule,
            self.prompt_len,
            self.prefill_end,
            self.requested_point,
            self.max_length,
            self.on_demand,
            self.shares_context,
            n,
        )

    def _skip_equal(self, due: int, n: int) -> None:
        """Skip evictions up to ``n`` that hold as many blocks as the one after ``due``.

        Evictions at equal distances move the tail start by equal distances, and the store of a
        budget in tokens stays the same. The last eviction of such a series is not skipped.

        Args:
            due: Length at the last eviction.
            n: Length up to which evictions are skipped.

        """
        end, step = self.prefill_end, self.rule.prefill_stride
        if due >= end or self.rule.every:
            end, step = sys.maxsize, self.rule.stride
            if self.max_length is not None:
                end = self.max_length - 1
        elif due < self.context_end:
            end = self.context_end
        if self.next_eviction is None or self.next_eviction - due != step or self.shares_context:
            return
        if self.rule.every and self.rule.share is not None:
            return
        last = min(end - 1, n)
        skipped = max(0, (last - self.next_eviction) // step - 1) * step
        self.next_eviction += skipped
        self.tail_start += skipped


@lru_cache(maxsize=1024)
def _first_position(rule: EvictionRule) -> int | None:
    """Return the first position at which requests of a rule evict, which all of them search
    for."""
    return EvictionProgress(rule, 0, 0, max_length=0).next_position(0, LONGEST)


@lru_cache(maxsize=4096)
def _sufficient_blocks(
    rule: EvictionRule,
    prompt_len: int,
    prefill_end: int,
    requested_point: int | None,
    max_length: int | None,
    on_demand: bool,
    shares_context: bool,
    n: int,
) -> int:
    """Implementation of :meth:`EvictionProgress.sufficient_blocks`, called in every step in which a
    prompt waits."""
    assert rule.budget_tokens is not None, "the store of a share grows with every eviction"
    request = EvictionProgress(
        rule,
        prompt_len,
        prefill_end,
        requested_point,
        max_length,
        on_demand,
        shares_context=shares_context,
    )
    bs, peak = rule.block_size, 0
    while request.next_eviction is not None and n >= request.next_eviction:
        due = request.next_eviction
        in_flight = n > due and (due >= prefill_end or not request.has_eviction_points)
        held = blocks_for(due, bs) - request.tail_start // bs + request.store_blocks
        peak = max(peak, held + in_flight)
        request.evict(due)
        request._skip_equal(due, n)
    return max(peak, blocks_for(n, bs) - request.tail_start // bs + request.store_blocks)

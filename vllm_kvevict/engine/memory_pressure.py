"""The blocks that admissions leave free, and the choice of requests that evict under pressure.

An admission leaves free what the running requests will take before their evictions give blocks
back: the highest point of all of them within an interval, which follows from lengths. A prompt that
evicts at its end holds most of its blocks for a few steps only, so what it gives back is free again
before that point. The number becomes vLLM's ``watermark_blocks`` while requests wait. A request
that evicts on demand has no due length. It gets one here when free blocks fall below the low
watermark, after vLLM has scheduled a step and before the step is planned.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.core.sched.request_queue import SchedulingPolicy

from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.planner import StepPlanner
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.ring_queue import RingQueue
from vllm_kvevict.rules.rule import blocks_for
from vllm_kvevict.rules.watermarks import Watermarks

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

PIPELINE_STEPS = 3
"""Steps between the request for an eviction and free blocks, not counting those that record the
window: the current step, the step of the eviction, and one step in flight."""

MAX_RESERVE_DIVISOR = 4
"""Admissions leave at most the size of the pool divided by this number free."""

MAX_COUNTED_PROMPTS = 64
"""Number of waiting requests with prompts that are counted; the others are assumed to be as long on
average."""

FORECAST_STEPS = 8
"""Number of steps for which a forecast is valid while the number of running requests stays the
same.

It does not move along with these steps. What evictions return meanwhile is free, and that the
running requests will take it again is not counted before the next forecast, so the forecast may be
too low by some blocks. If an admission takes these blocks, an eviction that lacks them is
postponed, and from the next step on admissions leave them free; a request that finds no block for
its next token makes vLLM preempt the last running one, as without the plugin."""

Prospect = tuple[tuple[int, int, int], RequestState, dict[int, int]]
"""Sort key (lowest priority first, then most blocks freed, then least recently evicted), the
request that may be evicted, and the length at which each of its groups would evict."""


class Forecast:
    """Forecast of the blocks of running requests: one more every ``block_size`` steps, and fewer
    after every eviction.

    The lengths of the requests determine when each one evicts and how many blocks that frees, so
    the peak over all requests is known. Admissions that leave room for the peak are not preempted
    again. Requests that free no blocks by their next eviction grow as in vLLM without the plugin,
    and count as there: not at all.

    Args:
        core: The engine core.

    """

    def __init__(self, core: EvictionCore) -> None:
        self._core = core
        longest = max(rule.stride for rule in core.table.rules.values())
        # No answer is longer than a sequence may be.
        self._interval = min(longest, core.table.max_model_len)
        self._limit = core.cache.block_pool.num_gpu_blocks // MAX_RESERVE_DIVISOR
        self._running = self._age = 0
        self._held = self._peaks = np.zeros(1, np.int64)
        """Additional blocks that running requests hold after each step, and the maximum of the same
        from each step on."""
        self.last = 0
        """The last :meth:`peak`."""

    def peak(self) -> int:
        """Return the maximum number of additional blocks that running requests hold at any step of
        an interval.

        The result is 0 if no request waits for blocks or if nothing evicts in decode, and at most a
        quarter of the pool.
        """
        if not self._interval or not self._core.scheduler.waiting:
            self._held = self._peaks = np.zeros(1, np.int64)
            self._running, self.last = -1, 0
            return 0
        running, self._age = len(self._core.scheduler.running), self._age + 1
        if running != self._running or self._age >= FORECAST_STEPS:
            self._running, self._age = running, 0
            self._held = np.cumsum(self._changes())
            self._peaks = np.maximum.accumulate(self._held[::-1])[::-1]
            self.last = min(self._limit, max(0, int(self._peaks[0])))
        return self.last

    def peak_with(self, state: RequestState, hit: int, shared: Mapping[int, int]) -> int:
        """Return the blocks that the admission of a waiting request must leave free.

        Until the blocks that its first eviction frees have returned, this is what the running
        requests take up to then. Afterwards it is the peak, less these blocks. The result is
        :attr:`last` if the prompt does not evict at its end, or if its blocks return later than an
        interval from now. It never exceeds :attr:`last`.

        Args:
            state: The request, which holds no blocks.
            hit: Tokens of its prompt that are found in the prefix cache.
            shared: Blocks of the hit that other requests hold, by KV-cache group. Its eviction does
                not free them.

        """
        gain = grows = 0
        for group, progress in state.progress.items():
            if progress.next_eviction != progress.prefill_end or progress.has_eviction_points:
                continue
            freed = progress.gain(progress.next_eviction) - shared.get(group, 0)
            gain += max(0, freed)
            grows += freed > 0
        returned = self._steps_of_prefill(state.prefill_end - hit) + PIPELINE_STEPS
        if not self.last or not gain or returned >= len(self._held):
            return self.last
        # The request itself grows, too, until it evicts again.
        size = min(manager.block_size for manager in self._core.managers.values())
        answer = blocks_for(len(self._held) - returned, size) * grows
        later = int(self._peaks[returned]) + answer - gain
        return max(0, min(self.last, max(later, int(self._held[: returned + 1].max()))))

    def _steps_of_prefill(self, tokens: int) -> int:
        """Return the steps in which ``tokens`` tokens of a prompt are computed, after those of the
        prompts that run."""
        scheduler = self._core.scheduler
        for state in self._core.table.prefilling.values():
            tokens += max(0, state.request.num_tokens - state.request.num_computed_tokens)
        a_step = max(1, scheduler.max_num_scheduled_tokens - len(scheduler.running))
        return blocks_for(tokens, a_step)

    def _changes(self) -> np.ndarray:
        """Return the blocks taken, less those freed, for each step: [steps] int64."""
        changes = np.zeros(self._interval + PIPELINE_STEPS + 1, np.int64)
        # Number of requests that take a block in each step of a block's length, by block size.
        grows = {m.block_size: [0] * m.block_size for m in self._core.managers.values()}
        for request in self._core.scheduler.running:
            state = self._core.table.states.get(request.request_id)
            if state is None or not state.holds_blocks:
                continue
            start = request.num_computed_tokens
            length = max(start, state.prefill_end)
            for size, due, gain, count in self._contribution(state, length):
                changes[0] += count * (blocks_for(length, size) - blocks_for(start, size))
                grows[size][-length % size] += count
                if (step := max(0, due - length) + PIPELINE_STEPS) < len(changes):
                    changes[step] -= gain
        for size, first_steps in grows.items():
            for first, requests in enumerate(first_steps):
                if requests:
                    changes[first::size] += requests
        return changes

    def _contribution(self, state: RequestState, length: int) -> list[tuple[int, int, int, int]]:
        """Return (block size, length of the eviction, blocks freed, groups) of a request's next
        evictions.

        The result is cached until the progress of the request changes: computing it takes 41 ms for
        256 running requests with 8 groups.
        """
        if state.forecast is not None and state.forecast[0] == state.version:
            return state.forecast[1]
        totals: dict[tuple[int, int], list[int]] = {}
        in_prefill = state.request.num_computed_tokens < length
        for group, progress in state.progress.items():
            if progress.next_eviction is None or (in_prefill and progress.rule.prefill_stride):
                # A prompt that evicts during prefill holds little more than it already does.
                continue
            manager = self._core.managers[group]
            due = max(progress.next_eviction, length)
            # Before the first eviction, other requests may share the blocks that it would free.
            gain = progress.gain(due) if progress.evicted else manager.quote(state, due).gain
            if gain > 0:
                total = totals.setdefault((manager.block_size, due), [0, 0])
                total[0] += gain
                total[1] += 1
        result = [(*where, gain, count) for where, (gain, count) in totals.items()]
        if not in_prefill:
            state.forecast = state.version, result
        return result


class MemoryPressure:
    """Sets the number of blocks that admissions leave free, and requests evictions under pressure.

    Requests with on-demand eviction are evicted when free blocks fall below the low watermark.
    Blocks that are promised to prompts do not count as free. Eviction therefore comes before
    preemption and before queueing.

    Args:
        core: The engine core.
        turns: The queue of the ring slots.
        planner: Limits the decode evictions of a step, and knows the blocks that postponed ones
            lack.

    """

    def __init__(self, core: EvictionCore, turns: RingQueue, planner: StepPlanner) -> None:
        self._core = core
        self._table = core.table
        self._turns = turns
        self._planner = planner
        self.forecast = Forecast(core)
        self._cache = core.cache
        self.watermark = self._cache.watermark_blocks
        """Blocks that admissions leave free by vLLM's own flag."""
        config = core.table.config
        pool = self._cache.block_pool.num_gpu_blocks
        self.watermarks = Watermarks(pool, config.options.low_mark, config.options.high_mark)
        self.lead = PIPELINE_STEPS + (self._table.window if turns.slots is not None else 0)
        """Steps until an eviction that begins now has freed blocks."""
        self._evictions = 0

    def begin_step(self) -> None:
        """Set the blocks that admissions of the next step leave free for running requests.

        They include the blocks that a postponed eviction lacks. Otherwise an admission would take
        every free block before the eviction is planned again.
        """
        marks = self.watermarks
        marks.reserve = self.reserve() if self._table.on_demand else 0
        self._leave_free(self.forecast.peak())

    def consider(
        self,
        state: RequestState | None,
        hit: int = 0,
        blocks: "Sequence[Sequence[KVCacheBlock]]" = (),
    ) -> None:
        """Set the blocks that the admission of a waiting request leaves free.

        Args:
            state: The request that vLLM may admit next; None for one that gives no blocks back
                within a known number of steps.
            hit: Tokens of its prompt that are found in the prefix cache.
            blocks: The blocks with these tokens, by KV-cache group.

        """
        if state is None:
            self._leave_free(self.forecast.last)
            return
        shared = {
            group: sum(block.ref_cnt > 0 for block in found) for group, found in enumerate(blocks)
        }
        self._leave_free(self.forecast.peak_with(state, hit, shared))

    def _leave_free(self, peak: int) -> None:
        planned = max(self.watermark, self.watermarks.reserve, peak)
        self._cache.watermark_blocks = planned + self._planner.short

    def relieve(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Request evictions that bring the free blocks back to the high watermark.

        Args:
            num_scheduled_tokens: Tokens that each request computes in the next step; their blocks
                are already taken.

        """
        marks = self.watermarks
        if not self._table.on_demand:
            marks.pressing = False
            return
        free = self._core.free
        available = free - self.promised()
        marks.update(available)
        missing = marks.high - available - self._arriving()
        if marks.pressing and missing > 0:
            prospects = self._prospects(num_scheduled_tokens, urgent=free < marks.reserve)
            self._request(prospects, missing)

    def reserve(self) -> int:
        """Return the blocks that running requests take until an eviction that begins now has freed
        some."""
        tokens = self.lead * len(self._core.scheduler.running)
        needed = sum(blocks_for(tokens, size) for size in self._cache.coordinator.group_block_sizes)
        return min(needed, self._cache.block_pool.num_gpu_blocks // MAX_RESERVE_DIVISOR)

    def promised(self) -> int:
        """Return the blocks that prompts still lack, both those in prefill and those to be
        admitted."""
        scheduler, promised = self._core.scheduler, 0
        for request_id, state in self._table.prefilling.items():
            length = state.request.num_tokens
            promised += sum(
                max(0, blocks_for(length, m.block_size) - len(m.req_to_blocks.get(request_id, ())))
                for m in self._core.managers.values()
            )
        places = scheduler.max_num_active_reqs - len(scheduler.running)
        return promised + (self._waiting(places) if places > 0 and scheduler.waiting else 0)

    def _waiting(self, places: int) -> int:
        """Return the blocks of the waiting prompts, as far as the batch has places.

        The cache is searched for the first prompt only; the others are assumed to share as much.
        """
        count = min(places, len(self._core.scheduler.waiting))
        waiting = list(islice(self._core.scheduler.waiting, min(count, MAX_COUNTED_PROMPTS)))
        hit, _, _ = self._cache.coordinator.find_longest_cache_hit(
            waiting[0].block_hashes, waiting[0].num_tokens - 1
        )
        counted = sum(
            max(0, blocks_for(request.num_tokens, m.block_size) - shared)
            for group, m in self._core.managers.items()
            for shared in [sum(block.ref_cnt > 0 for block in hit[group])]
            for request in waiting
        )
        return counted * count // len(waiting)

    def _arriving(self) -> int:
        """Return the blocks that requested evictions will free."""
        arriving = 0
        for state in self._table.on_demand.values():
            if state.expected_gain and state.quiet_until == sys.maxsize:
                # The eviction is planned, so the number of blocks that its step frees is known
                # until the step is processed.
                managers = self._core.managers.values()
                state.expected_gain = sum(manager.leaving(state) for manager in managers)
            arriving += state.expected_gain
        return arriving

    def _prospects(self, num_scheduled_tokens: Mapping[str, int], urgent: bool) -> list[Prospect]:
        """Return the requests that would hold fewer blocks after an eviction, sorted."""
        ranked = self._core.scheduler.policy == SchedulingPolicy.PRIORITY
        prospects = []
        for state in self._table.on_demand.values():
            start = state.request.num_computed_tokens
            tokens = num_scheduled_tokens.get(state.request_id, 0)
            # Not all drafts will be accepted.
            if state.expected_gain or (tokens > 1 and start >= state.prefill_end):
                continue
            window = self._table.window if state.needs.window == "required" else 0
            dues, gain = {}, 0
            for group, progress in state.progress.items():
                # Unless a preemption is near, no request is evicted again within an interval.
                if start < progress.no_eviction_before and not (
                    urgent and progress.can_evict_on_demand
                ):
                    continue
                due = progress.on_demand_length(start, start + tokens, window)
                if due is not None:
                    dues[group] = due
                    gain += progress.gain(due)
            if gain > 0:
                order = -state.request.priority * ranked, -gain, state.pressure_order
                prospects.append((order, state, dues))
        return sorted(prospects, key=itemgetter(0))

    def _request(self, prospects: list[Prospect], missing: int) -> None:
        """Request evictions in order until they free the missing blocks."""
        decoding, slots = self._planner.max_decode_evictions(), self._turns.free_slots
        for _, state, dues in prospects:
            if missing <= 0:
                return
            records = state.needs.window == "required"
            decodes = not state.in_prefill(max(dues.values()))
            # A window holds its slot while it is recorded, and the evictions per step are limited.
            if decodes and (decoding < 1 or (records and slots < 1)):
                continue
            gain = self._request_one(state, dues)
            if gain:
                decoding -= decodes
                slots -= decodes and records
                missing -= gain

    def _request_one(self, state: RequestState, wanted: Mapping[int, int]) -> int:
        """Request the eviction of the groups that gain blocks; return the blocks that this
        frees."""
        dues, total = {}, 0
        for group, due in wanted.items():
            gain = self._core.managers[group].quote(state, due).gain
            if gain > 0:
                dues[group] = due
                total += gain
            else:
                state.defer(group, due)
                self._core.counters.skipped_shared += 1
        if dues:
            state.request_eviction(dues)
            # The window may begin with the step that is about to be planned.
            self._turns.look_soon(state)
            self._evictions += 1
            state.pressure_order, state.expected_gain = self._evictions, total
        return total

"""What admissions leave free, and whom eviction under pressure takes when free blocks run short."""

import sys
from collections.abc import Mapping
from itertools import accumulate, islice
from operator import itemgetter

from vllm.v1.core.sched.request_queue import SchedulingPolicy

from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.planner import StepPlanner
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.ring_queue import RingQueue
from vllm_kvevict.timeline.rule import blocks_for
from vllm_kvevict.timeline.watermarks import Watermarks

SLACK = 3
"""Steps between a request for an eviction and free blocks, beside those that record the window: its
own, the eviction's, and one in flight."""

MOST_RESERVE = 4
"""What admissions leave free is at most the pool divided by this."""

LOOK_AHEAD = 64
"""Waiting requests whose prompts are counted; the others are taken to be as long on average."""

REFRESH = 8
"""Steps for which a forecast holds while as many requests run."""

Prospect = tuple[tuple[int, int, int], RequestState, dict[int, int]]
"""Its place in the order (least important first, then the one that gives most blocks, then the one
evicted longest ago), a request that may be evicted, and where each of its groups would be."""


class Forecast:
    """The coming sawtooth: a block every ``block_size`` steps, and fewer at every eviction.

    Lengths tell when each request evicts and what that gives back, so the highest point of all of
    them together is known. Admissions that leave room for it are not preempted again. Requests
    whose next eviction gives nothing back grow as in vLLM without the plugin, and count as there:
    not at all.

    Args:
        core: What the engine works on.

    """

    def __init__(self, core: EvictionCore) -> None:
        self._core = core
        self._interval = max(rule.stride for rule in core.table.rules.values())
        self._running = self._age = self._peak = 0

    def peak(self) -> int:
        """Most blocks beyond today's that running requests hold at any step of an interval.

        0 where no request waits for them, and where nothing evicts in decode; at most a quarter of
        the pool.
        """
        if not self._interval or not self._core.scheduler.waiting:
            return 0
        running, self._age = len(self._core.scheduler.running), self._age + 1
        if running != self._running or self._age >= REFRESH:
            self._running, self._age = running, 0
            most = self._core.cache.block_pool.num_gpu_blocks // MOST_RESERVE
            self._peak = min(most, max(0, *accumulate(self._changes())))
        return self._peak

    def _changes(self) -> list[int]:
        """Blocks taken less those given back, by step."""
        changes = [0] * (self._interval + SLACK + 1)
        # Requests that take a block in each step of a block's length, by block size.
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
                if (step := max(0, due - length) + SLACK) < len(changes):
                    changes[step] -= gain
        for size, first_steps in grows.items():
            for first, requests in enumerate(first_steps):
                if requests:
                    for step in range(first, len(changes), size):
                        changes[step] += requests
        return changes

    def _contribution(self, state: RequestState, length: int) -> list[tuple[int, int, int, int]]:
        """(block size, due, blocks given, groups) of a request's coming evictions.

        Kept until its timelines change: they take 41 ms at 256 running requests with 8 groups.
        """
        if state.forecast is not None and state.forecast[0] == state.version:
            return state.forecast[1]
        found: dict[tuple[int, int], list[int]] = {}
        in_prefill = state.request.num_computed_tokens < length
        for group, timeline in state.timelines.items():
            if timeline.next_eviction is None or (in_prefill and timeline.timeline.prefill_stride):
                # A prompt that evicts as it streams in holds little more than it does already.
                continue
            manager = self._core.managers[group]
            due = max(timeline.next_eviction, length)
            # Before the first eviction others may share what it would give back.
            gain = timeline.gain(due) if timeline.evicted else manager.quote(state, due).gain
            if gain > 0:
                total = found.setdefault((manager.block_size, due), [0, 0])
                total[0] += gain
                total[1] += 1
        result = [(*where, gain, count) for where, (gain, count) in found.items()]
        if not in_prefill:
            state.forecast = state.version, result
        return result


class MemoryPressure:
    """Sets what admissions leave free, and requests evictions under pressure.

    Those on demand are asked to evict when free blocks fall below the low watermark. Free blocks
    exclude those promised to prompts. So eviction comes before preemption and before queueing.

    Args:
        core: What the engine works on.
        turns: Ring slots.
        planner: How many decode evictions a step may carry, and what they lacked.

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
        self.lead = SLACK + (self._table.window if turns.slots is not None else 0)
        """Steps until an eviction that begins now has given blocks back."""
        self._evictions = 0

    def begin_step(self) -> None:
        """Before vLLM schedules: admissions leave to running requests what these will take.

        And what an eviction lacks that was put off for want of blocks: else each block that comes
        free is taken by an admission before the eviction is planned again.
        """
        marks = self.watermarks
        marks.reserve = self.reserve() if self._table.on_demand else 0
        planned = max(self.watermark, marks.reserve, self.forecast.peak())
        self._cache.watermark_blocks = planned + self._planner.short

    def relieve(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Request evictions that bring the free blocks back to the high watermark.

        Args:
            num_scheduled_tokens: Tokens that each request computes in the coming step, whose
                blocks are taken already.

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
        """Blocks that running requests take until an eviction that begins has given some back."""
        tokens = self.lead * len(self._core.scheduler.running)
        needed = sum(blocks_for(tokens, size) for size in self._cache.coordinator.group_block_sizes)
        return min(needed, self._cache.block_pool.num_gpu_blocks // MOST_RESERVE)

    def promised(self) -> int:
        """Blocks that prompts still lack: those being computed, and those to be admitted."""
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
        """Blocks of the prompts that wait, as far as the batch has places.

        The cache is asked about the first of them only: the others are taken to share as much.
        """
        count = min(places, len(self._core.scheduler.waiting))
        waiting = list(islice(self._core.scheduler.waiting, min(count, LOOK_AHEAD)))
        found, _, _ = self._cache.coordinator.find_longest_cache_hit(
            waiting[0].block_hashes, waiting[0].num_tokens - 1
        )
        counted = sum(
            max(0, blocks_for(request.num_tokens, m.block_size) - shared)
            for group, m in self._core.managers.items()
            for shared in [sum(block.ref_cnt > 0 for block in found[group])]
            for request in waiting
        )
        return counted * count // len(waiting)

    def _arriving(self) -> int:
        """Blocks that evictions on their way will give back."""
        arriving = 0
        for state in self._table.on_demand.values():
            if state.expected_gain and state.quiet_until == sys.maxsize:
                # It is planned: what its step gives back is known, until it has.
                managers = self._core.managers.values()
                state.expected_gain = sum(manager.leaving(state) for manager in managers)
            arriving += state.expected_gain
        return arriving

    def _prospects(self, num_scheduled_tokens: Mapping[str, int], urgent: bool) -> list[Prospect]:
        """Requests that an eviction would make smaller, in their order."""
        ranked = self._core.scheduler.policy == SchedulingPolicy.PRIORITY
        found = []
        for state in self._table.on_demand.values():
            start = state.request.num_computed_tokens
            tokens = num_scheduled_tokens.get(state.request_id, 0)
            # Of drafts not all will be accepted.
            if state.expected_gain or (tokens > 1 and start >= state.prefill_end):
                continue
            window = self._table.window if state.needs.window == "required" else 0
            dues, gain = {}, 0
            for group, timeline in state.timelines.items():
                # Short of a preemption no request is evicted again before an interval has passed.
                if start < timeline.no_eviction_before and not (
                    urgent and timeline.can_evict_on_demand
                ):
                    continue
                due = timeline.on_demand_length(start, start + tokens, window)
                if due is not None:
                    dues[group] = due
                    gain += timeline.gain(due)
            if gain > 0:
                order = -state.request.priority * ranked, -gain, state.pressure_order
                found.append((order, state, dues))
        return sorted(found, key=itemgetter(0))

    def _request(self, prospects: list[Prospect], missing: int) -> None:
        """Request evictions in their order until they give back what is missing."""
        decoding, slots = self._planner.most_decode_evictions(), self._turns.free_slots
        for _, state, dues in prospects:
            if missing <= 0:
                return
            records = state.needs.window == "required"
            decodes = not state.in_prefill(max(dues.values()))
            # A window takes its slot for as long as it is recorded, and a step so many evictions.
            if decodes and (decoding < 1 or (records and slots < 1)):
                continue
            gain = self._request_one(state, dues)
            if gain:
                decoding -= decodes
                slots -= decodes and records
                missing -= gain

    def _request_one(self, state: RequestState, wanted: Mapping[int, int]) -> int:
        """Request the groups that gain blocks; returns the blocks that this will give."""
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
            # Its window may begin with the step that is about to be planned.
            self._turns.look_soon(state)
            self._evictions += 1
            state.pressure_order, state.expected_gain = self._evictions, total
        return total

"""Blocks that running requests will take before their evictions give some back."""

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from vllm_kvevict.engine.demand import MOST_RESERVE, SLACK
from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.schedule.timeline import blocks_for

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

REFRESH = 8
"""Steps for which a forecast holds while as many requests run."""


class Forecast:
    """The coming sawtooth: a block every ``block_size`` steps, and fewer at every eviction.

    Lengths say when each request evicts and what that gives back, so the highest point of all of
    them together is known. Admissions that leave room for it are not preempted again. Requests
    whose next eviction gives nothing back grow as in vLLM without the plugin, and count as there:
    not at all.

    Args:
        scheduler: vLLM's, whose running requests are counted.
        ledger: Timelines of all admitted requests.
        managers: The block managers that evict, by KV-cache group.

    """

    def __init__(
        self,
        scheduler: "Scheduler",
        ledger: EvictionLedger,
        managers: Mapping[int, EvictableAttentionManager],
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._managers = managers
        self._interval = max(rule.stride for rule in ledger.rules.values())
        self._running = self._age = 0
        self._peak = 0

    def peak(self) -> int:
        """Most blocks beyond today's that running requests hold at any step of an interval.

        0 where nobody waits for them, and where nothing evicts in decode; at most a quarter of
        the pool.
        """
        if not self._interval or not self._scheduler.waiting:
            return 0
        running, self._age = len(self._scheduler.running), self._age + 1
        if running != self._running or self._age >= REFRESH:
            self._running, self._age = running, 0
            most = self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks // MOST_RESERVE
            self._peak = min(most, max(0, *accumulate(self._changes())))
        return self._peak

    def _changes(self) -> list[int]:
        """Blocks taken less those given back, by step."""
        changes = [0] * (self._interval + SLACK + 1)
        grows = {group: [0] * m.block_size for group, m in self._managers.items()}
        for request in self._scheduler.running:
            entry = self._ledger.entries.get(request.request_id)
            if entry is not None:
                self._count(request.request_id, entry, request.num_computed_tokens, changes, grows)
        for group, first_steps in grows.items():
            size = self._managers[group].block_size
            for first, requests in enumerate(first_steps):
                for step in range(first, len(changes), size):
                    changes[step] += requests
        return changes

    def _count(
        self,
        request_id: str,
        entry: Entry,
        start: int,
        changes: list[int],
        grows: dict[int, list[int]],
    ) -> None:
        """Enter one request, with ``start`` tokens: its evictions, and where it next grows."""
        length = max(start, entry.prefill_end)
        for group, timeline in entry.timelines.items():
            if timeline.due is None or (start < length and timeline.timeline.prefill_stride):
                # A prompt that evicts as it streams in holds little more than it does already.
                continue
            manager = self._managers[group]
            due = max(timeline.due, length)
            # Before the first eviction others may share what it would give back.
            evicted = timeline.evicted
            gain = timeline.gain(due) if evicted else manager.gain(request_id, entry, due)
            if gain <= 0:
                continue
            size = manager.block_size
            changes[0] += blocks_for(length, size) - blocks_for(start, size)
            grows[group][-length % size] += 1
            if (step := due - length + SLACK) < len(changes):
                changes[step] -= gain

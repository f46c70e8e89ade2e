"""Where the survivors of an eviction go, and whether it is worth its blocks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.schedule.timeline import blocks_for

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

LEAST = 4
"""Decode evictions that a step may always carry."""


class Stores:
    """What evictions may take from the pool, and which of them give more back.

    Args:
        scheduler: vLLM's, whose running requests and blocks are counted.
        ledger: Timelines of all admitted requests.
        managers: The block managers that evict, by KV-cache group.
        counters: Totals, counted here.

    """

    def __init__(
        self,
        scheduler: "Scheduler",
        ledger: EvictionLedger,
        managers: Mapping[int, EvictableAttentionManager],
        counters: Counters,
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._managers = managers
        self._counters = counters
        self._asking: list[str] = []
        """Decoding requests that lack a ring slot and do not wait for one."""

    def worthwhile(self, request_id: str, entry: Entry, groups: list[int], end: int) -> list[int]:
        """Those of ``groups`` whose next eviction gives back more blocks than it takes.

        The others share too much with other requests, and are put off to their next interval.
        Where evictions run whatever is shared: all. So do those that others will take.
        """
        if self._ledger.evicts_shared or entry.context is not None:
            return groups
        gains = {g: self._managers[g].gain(request_id, entry, end) for g in groups}
        for group, gain in gains.items():
            if gain <= 0:
                entry.defer(group, end)
                self._counters.skipped_shared += 1
        return [group for group, gain in gains.items() if gain > 0]

    def take_turns(self) -> None:
        """Find the decoding requests that come near an eviction, and share out ring slots."""
        ledger = self._ledger
        asking, self._asking = self._asking + ledger.come_near(), []
        if ledger.turns is None:
            return
        for request_id in asking:
            entry = ledger.near.get(request_id)
            if entry is None or not ledger.wants_slot(entry) or ledger.turns.waits(request_id):
                continue
            end = self._scheduler.requests[request_id].num_computed_tokens + 1
            if self.worthwhile(request_id, entry, entry.coming_groups(end), end):
                ledger.turns.wait(request_id)
            else:
                self._asking.append(request_id)
        ledger.take_turns()

    def most_decode_evictions(self) -> int:
        """How many decode evictions a step may carry: everybody's next token waits for them.

        Twice what running requests need on average, so none waits long for its turn; those that
        were admitted together evict in different steps from there on. No bound where tokens must
        not depend on neighbours.
        """
        running = len(self._scheduler.running)
        if self._ledger.evicts_shared:
            return running
        strides = [rule.stride for rule in self._ledger.rules.values() if rule.stride]
        return max(LEAST, blocks_for(2 * running, min(strides, default=1)))

    def short(self, request_id: str, entry: Entry, groups: list[int], end: int) -> bool:
        """Whether the pool lacks what the evictions of ``groups`` must take from it.

        Never where they give back more than they take: they find room in their own blocks.
        """
        if not self._ledger.evicts_shared and entry.context is None:
            return False
        missing = sum(self._managers[g].missing(request_id, entry, end) for g in groups)
        return missing > self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def room(self) -> int:
        """Free blocks, less what running requests may take in the next step."""
        scheduler = self._scheduler
        chunk = scheduler.max_num_scheduled_tokens if scheduler._inflight_prefills else 0
        next_step = sum(
            len(scheduler.running) + blocks_for(chunk, size)
            for size in scheduler.kv_cache_manager.coordinator.group_block_sizes
        )
        return scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - next_step

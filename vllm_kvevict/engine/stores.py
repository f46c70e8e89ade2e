"""Who gets a store: fresh blocks for an eviction, where the pool has them to spare."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_kvevict.engine.ledger import Entry, EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.engine.points import EvictionPoints
from vllm_kvevict.schedule.timeline import blocks_for

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class StoreGrants:
    """Grants stores to evictions, to all groups of a request that are due or to none.

    Args:
        scheduler: vLLM's, whose running requests and blocks are counted.
        ledger: Timelines of all admitted requests.
        managers: The block managers that evict, by KV-cache group.
        points: Where chunks of prefill end.

    """

    def __init__(
        self,
        scheduler: "Scheduler",
        ledger: EvictionLedger,
        managers: Mapping[int, EvictableAttentionManager],
        points: EvictionPoints,
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._managers = managers
        self._points = points

    def reserve(self) -> None:
        """Grant stores to decode evictions that would run in the coming step.

        Only while every running request still finds its next block.
        """
        headroom = -1
        entries = self._ledger.entries
        for request in self._scheduler.running:
            entry = entries.get(request.request_id)
            start = request.num_computed_tokens
            if entry is None or start < entry.quiet_until or request.is_prefill_chunk:
                continue
            groups = self.runnable(request.request_id, entry, start, start + 1)
            if not groups:
                continue
            if headroom < 0:
                headroom = sum(map(self._next_blocks, self._scheduler.running))
            self.grant(request.request_id, entry, groups, headroom)

    def runnable(self, request_id: str, entry: Entry, start: int, end: int) -> list[int]:
        """Groups that should evict with a step over [start, end), if they get a store."""
        groups = entry.due_groups(end)
        if (
            not groups
            or self._ledger.last_step(request_id, end)
            or not self._ledger.window_ready(entry, start, end)
        ):
            return []
        return groups

    def grant(self, request_id: str, entry: Entry, groups: list[int], headroom: int) -> bool:
        """Grant a store to every one of the groups, or to none.

        Args:
            request_id: The request.
            entry: Its entry.
            groups: Groups that should evict; those that have a store already keep it.
            headroom: Blocks that must stay free beside the stores.

        """
        missing = [g for g in groups if not self._managers[g].granted(request_id)]
        blocks = sum(entry.timelines[g].store_blocks for g in missing)
        pool = self._scheduler.kv_cache_manager.block_pool
        if pool.get_num_free_blocks() < blocks + headroom:
            return False
        for group in missing:
            self._managers[group].grant(request_id, entry)
        return True

    def _next_blocks(self, request: "Request") -> int:
        """Most blocks that a running request takes in the coming step."""
        start = request.num_computed_tokens
        end, store = start + 1, 0
        if request.is_prefill_chunk:
            end = min(request.num_tokens, start + self._scheduler.max_num_scheduled_tokens)
            end = self._points.clip(request.request_id, start, end)
            if (entry := self._ledger.entries.get(request.request_id)) is not None:
                store = sum(entry.timelines[g].store_blocks for g in entry.due_groups(end))
        return store + sum(
            blocks_for(end, size) - blocks_for(start, size)
            for size in self._scheduler.kv_cache_manager.coordinator.group_block_sizes
        )

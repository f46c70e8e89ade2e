"""Blocks that are free in the pool, and spoken for all the same."""

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.schedule.timeline import blocks_for

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

SLACK = 3
"""Steps between a call and free blocks beside those that record the window: the call's own, the
eviction's, and one in flight."""

MOST_RESERVE = 4
"""The reserve is at most the pool divided by this."""

LOOK_AHEAD = 64
"""Waiting requests whose prompts are counted; the others are taken to be as long on average."""


class Demand:
    """What running and waiting requests need of the pool.

    Args:
        scheduler: vLLM's.
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

    def reserve(self) -> int:
        """Blocks that running requests take until an eviction that begins has given some back."""
        lead = SLACK + (self._ledger.window if self._ledger.rings is not None else 0)
        tokens = lead * len(self._scheduler.running)
        cache = self._scheduler.kv_cache_manager
        taken = sum(blocks_for(tokens, size) for size in cache.coordinator.group_block_sizes)
        return min(taken, cache.block_pool.num_gpu_blocks // MOST_RESERVE)

    def promised(self) -> int:
        """Blocks that prompts still lack: those being computed, and those that would be let in."""
        scheduler, promised = self._scheduler, 0
        for request_id in self._ledger.prefilling:
            length = scheduler.requests[request_id].num_tokens
            promised += sum(
                max(0, blocks_for(length, m.block_size) - len(m.req_to_blocks.get(request_id, ())))
                for m in self._managers.values()
            )
        room = scheduler.max_num_active_reqs - len(scheduler.running)
        return promised + (self._waiting(room) if room > 0 and scheduler.waiting else 0)

    def _waiting(self, room: int) -> int:
        """Blocks of the prompts that wait, as far as there is room in the batch.

        The cache is asked about the first of them only: the others are taken to share as much.
        """
        count = min(room, len(self._scheduler.waiting))
        waiting = list(islice(self._scheduler.waiting, min(count, LOOK_AHEAD)))
        found, _, _ = self._scheduler.kv_cache_manager.coordinator.find_longest_cache_hit(
            waiting[0].block_hashes, waiting[0].num_tokens - 1
        )
        counted = sum(
            max(0, blocks_for(request.num_tokens, m.block_size) - shared)
            for group, m in self._managers.items()
            for shared in [sum(block.ref_cnt > 0 for block in found[group])]
            for request in waiting
        )
        return counted * count // len(waiting)

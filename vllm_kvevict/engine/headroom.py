"""Blocks that must stay free so that running requests reach their next evictions."""

from itertools import accumulate
from typing import TYPE_CHECKING

from vllm_kvevict.engine.ledger import EvictionLedger

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

EVERY = 8
"""Steps for which a forecast stands."""


class Headroom:
    """Holds waiting requests back where the pool is about to need their blocks.

    Between two evictions a request grows by some blocks, which the second gives back. Requests
    that were admitted together grow together: a pool that is full when they have just evicted is
    short before they do again, and preempts. When each of them evicts is known from lengths, so
    the deepest point ahead is known, too. It goes to vLLM as the watermark that an admission
    leaves free.

    Requests that have not evicted yet count as they do for vLLM, not at all: what they share may
    keep them from it.

    Args:
        scheduler: vLLM's, whose watermark is set.
        ledger: Timelines of all admitted requests.

    """

    def __init__(self, scheduler: "Scheduler", ledger: EvictionLedger) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._manager = scheduler.kv_cache_manager
        self._least: int = self._manager.watermark_blocks
        self._stands = self._forecast = 0
        self._horizon = max(rule.stride for rule in ledger.rules.values())

    def update(self, reserve: int = 0) -> None:
        """Set the watermark for the step that is about to be scheduled: ``reserve`` at least."""
        self._stands -= 1
        if not self._horizon or not self._scheduler.waiting:
            self._stands = self._forecast = 0
        elif self._stands < 0:
            self._stands = EVERY - 1
            self._forecast = self.deepest()
        self._manager.watermark_blocks = max(self._least, reserve, self._forecast)

    def deepest(self) -> int:
        """Blocks by which running requests will hold more than they do, at most, within a stride.

        Evictions are counted on at the length at which they are due.
        """
        horizon, requests = self._horizon, self._ledger.requests
        change = [0] * (horizon + 1)
        for request_id, entry in self._ledger.entries.items():
            if entry.computed_valid is None:
                continue
            n = requests[request_id].num_computed_tokens
            for timeline in entry.timelines.values():
                due = timeline.due
                if due is None or due - n > horizon:
                    continue
                size = timeline.timeline.block_size
                for step in range(-n % size, horizon + 1, size):
                    change[step] += 1
                change[max(0, due - n)] -= timeline.gain(due)
        return max(0, *accumulate(change))

"""Eviction under pressure: who evicts when free blocks run short, and nobody before."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import SchedulingPolicy

from vllm_kvevict.engine.demand import Demand
from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.forecast import Forecast
from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.engine.marks import Marks
from vllm_kvevict.engine.stores import Stores
from vllm_kvevict.metrics.counters import Counters

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Prospect:
    """A request that may be called: where each of its groups would evict, and the blocks given."""

    request_id: str
    entry: Entry
    dues: dict[int, int]
    gain: int
    rank: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Least important first, then who gives most, then whose last turn is longest ago."""
        return -self.rank, -self.gain, self.entry.turn


class Pressure:
    """Calls requests that evict on demand when free blocks fall below the low mark.

    Free are blocks that nobody was promised: neither prompts that are being computed, nor those
    that wait for memory. So eviction comes before preemption and before queueing.

    Args:
        scheduler: vLLM's, whose blocks, running and waiting requests are counted.
        ledger: Timelines of all admitted requests.
        managers: The block managers that evict, by KV-cache group.
        stores: How many decode evictions a step may carry.
        counters: Totals, counted here.
        low: Share of the blocks at the low mark.
        high: Share of the blocks at the high mark.

    """

    def __init__(
        self,
        scheduler: "Scheduler",
        ledger: EvictionLedger,
        managers: Mapping[int, EvictableAttentionManager],
        stores: Stores,
        counters: Counters,
        low: float,
        high: float,
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._managers = managers
        self._stores = stores
        self._counters = counters
        self._demand = Demand(scheduler, ledger, managers)
        self._forecast = Forecast(scheduler, ledger, managers)
        self._cache = scheduler.kv_cache_manager
        self._watermark = self._cache.watermark_blocks
        self.marks = Marks(self._cache.block_pool.num_gpu_blocks, low, high)
        self._called: dict[str, tuple[Entry, int]] = {}
        """Requests whose eviction is on its way, and the blocks that it will give."""
        self._turns = 0

    def prepare(self) -> None:
        """Before vLLM schedules: admissions leave to running requests what these will take."""
        marks = self.marks
        marks.reserve = self._demand.reserve() if self._ledger.on_demand else 0
        self._cache.watermark_blocks = max(self._watermark, marks.reserve, self._forecast.peak())

    def call(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Call requests whose evictions bring the free blocks back to the high mark.

        Args:
            num_scheduled_tokens: Tokens that each request computes in the coming step, whose
                blocks are taken already.

        """
        if not self._ledger.on_demand:
            self.marks.pressing = False
            self._called.clear()
            return
        free = self._cache.block_pool.get_num_free_blocks()
        urgent = free < self.marks.reserve
        arriving = self._arriving()
        missing = self.marks.missing(free - self._demand.promised()) - arriving
        if self.marks.pressing and missing > 0:
            self._call(self._prospects(num_scheduled_tokens, urgent), missing)

    def _arriving(self) -> int:
        """Blocks that evictions on their way will give back."""
        arriving, managers = 0, self._managers.values()
        for request_id, (entry, gain) in list(self._called.items()):
            if self._ledger.entries.get(request_id) is not entry:
                del self._called[request_id]
            elif entry.quiet_until < sys.maxsize:
                arriving += gain
            elif leaving := sum(m.leaving(request_id) for m in managers):
                arriving += leaving
            else:
                del self._called[request_id]
        return arriving

    def _prospects(self, num_scheduled_tokens: Mapping[str, int], urgent: bool) -> list[Prospect]:
        """Requests that an eviction would make smaller, in their order."""
        ranked = self._scheduler.policy == SchedulingPolicy.PRIORITY
        found = []
        for request in self._scheduler.running:
            entry = self._ledger.entries.get(request.request_id)
            if entry is None or not entry.on_demand or request.request_id in self._called:
                continue
            tokens = num_scheduled_tokens.get(request.request_id, 0)
            if tokens > 1 and request.num_computed_tokens >= entry.prefill_end:
                # Drafts, not all of which will be accepted.
                continue
            prospect = self._prospect(request, entry, tokens, urgent, request.priority * ranked)
            if prospect.gain > 0:
                found.append(prospect)
        return sorted(found, key=lambda prospect: prospect.key)

    def _prospect(
        self, request: "Request", entry: Entry, tokens: int, urgent: bool, rank: int
    ) -> Prospect:
        start = request.num_computed_tokens
        window = self._ledger.window if self._ledger.records(entry) else 0
        dues, gain = {}, 0
        for group, timeline in entry.timelines.items():
            # Short of a preemption nobody is evicted again before an interval has passed.
            if start < timeline.not_before and not (urgent and timeline.waits):
                continue
            due = timeline.turn(start, start + tokens, window)
            if due is not None:
                dues[group] = due
                gain += timeline.gain(due)
        return Prospect(request.request_id, entry, dues, gain, rank)

    def _call(self, prospects: list[Prospect], missing: int) -> None:
        """Call prospects in their order until they give back what is missing."""
        decoding = self._stores.most_decode_evictions()
        turns = self._ledger.turns
        slots = turns.free if turns is not None else 0
        for prospect in prospects:
            if missing <= 0:
                return
            entry, records = prospect.entry, self._ledger.records(prospect.entry)
            decodes = not entry.in_prefill(max(prospect.dues.values()))
            # A window takes its slot for as long as it is recorded, and a step so many evictions.
            if decodes and (decoding < 1 or (records and slots < 1)):
                continue
            gain = self._really(prospect)
            if gain:
                decoding -= decodes
                slots -= decodes and records
                missing -= gain

    def _really(self, prospect: Prospect) -> int:
        """Call the groups that give back more than they take, whoever shares their blocks.

        Returns:
            The blocks that this will give.

        """
        request_id, entry = prospect.request_id, prospect.entry
        dues, total = {}, 0
        for group, due in prospect.dues.items():
            gain = self._managers[group].gain(request_id, entry, due)
            if gain > 0:
                dues[group] = due
                total += gain
            else:
                entry.defer(group, due)
                self._counters.skipped_shared += 1
        if dues:
            self._ledger.call(request_id, entry, dues)
            self._turns += 1
            entry.turn = self._turns
            self._called[request_id] = entry, total
        return total

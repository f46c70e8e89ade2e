"""The plan of each step: which requests record their queries, and which evict."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.engine.sharing import SharedStores
from vllm_kvevict.engine.stores import Stores
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.schedule.step_plan import Eviction, StepPlan

if TYPE_CHECKING:
    from vllm.v1.request import Request

EVICTED = "_kv_eviction_evicted"
"""Attribute of vLLM's ``Request`` that was evicted at least once."""


class StepPlanner:
    """Plans evictions for steps that vLLM has scheduled.

    Args:
        requests: vLLM's requests by id.
        ledger: Timelines and ring slots of all admitted requests.
        managers: The block managers that evict, by KV-cache group.
        stores: Where survivors go.
        shared: Stores that requests take from one another.
        counters: Totals, counted here.

    """

    def __init__(
        self,
        requests: "Mapping[str, Request]",
        ledger: EvictionLedger,
        managers: Mapping[int, EvictableAttentionManager],
        stores: Stores,
        shared: SharedStores,
        counters: Counters,
    ) -> None:
        self._requests = requests
        self._ledger = ledger
        self._managers = managers
        self._stores = stores
        self._shared = shared
        self._counters = counters
        self._left = 0
        """Decode evictions that the step may still take."""

    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> StepPlan:
        """The plan of a step, by the tokens that each request computes in it."""
        plan = StepPlan()
        self._take(plan, num_scheduled_tokens)
        self._shared.behind.publish(self._ledger.entries)
        self._left = self._stores.most_decode_evictions()
        observed: list[tuple[str, Entry, int]] = []
        ledger, counters = self._ledger, self._counters
        turns = ledger.turns
        for request_id in self._by_turns():
            entry, num_tokens = ledger.entries.get(request_id), num_scheduled_tokens.get(request_id)
            if entry is None or num_tokens is None:
                continue
            start = self._requests[request_id].num_computed_tokens
            end = start + num_tokens
            if entry.accumulates:
                plan.accumulating.append(request_id)
            if turns is not None and turns.waits(request_id):
                counters.postponed_ring += end >= entry.due
                continue
            observed.append((request_id, entry, end))
            if not entry.observes(end):
                continue
            if entry.in_prefill(end) and ledger.wants_slot(entry):
                coming = entry.coming_groups(end)
                if not self._stores.worthwhile(request_id, entry, coming, end):
                    continue
                ledger.observe(entry, start, end)
            if entry.ring is not None:
                plan.rings[request_id] = entry.ring
            self._plan_eviction(plan, request_id, entry, start, end)
        # Not before: a slot given back within the step would have two writers.
        for request_id, entry, end in observed:
            if entry.in_prefill(end):
                self._shared.passed(self._requests[request_id], end)
            ledger.settle(request_id, entry, end)
        return plan

    def _take(self, plan: StepPlan, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Tell the worker which stores were taken with the first blocks of requests."""
        for request_id in [r for r in self._ledger.taking if r in num_scheduled_tokens]:
            plan.taken[request_id] = self._shared.taken(request_id)
            self._counters.stores_taken += 1
            self._counters.tokens_taken += self._requests[request_id].num_computed_tokens

    def _by_turns(self) -> Iterator[str]:
        """Requests that a plan may concern: prompts first, which take ring slots from others."""
        prefilling = dict(self._ledger.prefilling)
        yield from prefilling
        self._stores.take_turns()
        yield from list(self._ledger.near)
        for request_id in list(self._ledger.counting):
            if request_id not in prefilling and request_id not in self._ledger.near:
                yield request_id

    def _plan_eviction(
        self, plan: StepPlan, request_id: str, entry: Entry, start: int, end: int
    ) -> None:
        if not entry.due_groups(end) or self._ledger.last_step(request_id, end):
            return
        counters = self._counters
        if not self._ledger.window_ready(entry, start, end):
            counters.postponed_ring += 1
            return
        if not entry.in_prefill(end) and self._left < 1:
            counters.postponed_turn += 1
            return
        groups = self._stores.worthwhile(request_id, entry, entry.due_groups(end), end)
        if not groups:
            return
        if self._stores.short(request_id, entry, groups, end):
            counters.postponed_blocks += 1
            return
        if entry.in_prefill(end):
            counters.evictions_prefill += 1
        else:
            counters.evictions_decode += 1
            self._left -= 1
        counters.evictions_pressure += entry.on_demand
        setattr(self._requests[request_id], EVICTED, True)
        evictions = [
            self._managers[g].evict(request_id, entry, end, self._stores.room) for g in groups
        ]
        published = self._shared.publish(self._requests[request_id], entry, end, evictions)
        counters.stores_published += published
        for eviction in evictions:
            eviction.published = published
            bs = self._managers[eviction.group_id].block_size
            counters.store_blocks_allocated += len(eviction.store) - eviction.reused
            counters.evictions_in_place += eviction.reused > 0
            counters.tokens_evicted += (
                eviction.tail_start
                - eviction.old_tail_start
                + (len(eviction.old_store) - len(eviction.store)) * bs
            )
        plan.evictions.append(
            Eviction(request_id, end, entry.ring, evictions, entry.policy, entry.protect_first)
        )

    def retire(self, plan: StepPlan) -> None:
        """Free what the evictions of a processed step replaced."""
        for eviction in plan.evictions:
            for group in eviction.groups:
                freed = self._managers[group.group_id].retire(eviction.request_id, group)
                self._counters.blocks_freed += freed

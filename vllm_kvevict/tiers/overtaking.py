"""Requests whose context is there go ahead of prompts that are computed whole, within bounds."""

from itertools import islice

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.table import RequestTable
from vllm_kvevict.tiers.stores import TieredStores

MOST = 8
"""Requests that may go ahead of a waiting one while nobody else is before it."""

MOST_LOOKED = 64
"""Requests that are looked at in a step."""


class Overtaking:
    """Lets a request whose store is there, or comes back, go to the front of vLLM's queue.

    It needs the store's blocks and computes what follows the point; a prompt before it waits for
    the blocks of all its tokens, and is longer than what follows, else it is not overtaken. The
    step that it goes ahead in admits no others, since one that computes a prompt takes as long as
    the prompt. Who arrives with ``n`` requests before it is overtaken ``MOST * (n + 1)`` times at
    most, and whoever overtook or was preempted is not.

    Args:
        scheduler: Whose queue it is; one that is ordered by priority stays as it is.
        table: All requests.
        stores: Published stores.

    """

    def __init__(self, scheduler: Scheduler, table: RequestTable, stores: TieredStores) -> None:
        self._scheduler = scheduler
        self._table = table
        self._stores = stores
        self._enabled = scheduler.policy == SchedulingPolicy.FCFS
        self._found: dict[str, RequestState] = {}
        """Those that arrived when their store was there or was looked for in files."""
        self._alone = False
        """Whether the coming step admits those that went ahead, and no others."""

    def arrive(self, state: RequestState) -> None:
        """Note a request that arrives; what is in files is read from now on."""
        if self._enabled and self._stores.there(state) is not False:
            self._found[state.request_id] = state

    def holds_back(self, state: RequestState) -> bool:
        """Whether a waiting request is not admitted in the coming step, since others are."""
        return self._alone and not (state.went_ahead or state.holds_blocks)

    def begin_step(self) -> None:
        """Before vLLM schedules: choose who goes ahead."""
        self._alone = False
        if not self._found:
            return
        queue, states = self._scheduler.waiting, self._table.states
        self._found = {r: s for r, s in self._found.items() if r in states and not s.holds_blocks}
        waiting = (states[request.request_id] for request in queue)
        before, first = [], next(waiting, None)
        while first is not None and (first.went_ahead or first.request_id in self._found):
            if first.went_ahead:
                before.append(first)
            first = next(waiting, None)
        if first is None or first.given is not None:
            return
        if not queue[0].num_preemptions:
            self._alone = self._choose(first, before)

    def _choose(self, first: RequestState, before: list[RequestState]) -> bool:
        """Move requests before the first of all others, and behind those that are there already."""
        scheduler, cache = self._scheduler, self._scheduler.kv_cache_manager
        queue = scheduler.waiting
        # Not those for which vLLM loads blocks, which are elsewhere, even when they are aborted.
        queued = set(queue)
        self._found = {r: s for r, s in self._found.items() if s.request in queued}
        places = scheduler.max_num_active_reqs - len(scheduler.running) - len(before)
        free = cache.block_pool.get_num_free_blocks() - cache.watermark_blocks
        free -= sum(map(self._stores.blocks_for, before))
        chosen: list[RequestState] = []
        shorter = (s for s in self._found.values() if _rest(s) < first.request.num_tokens)
        for state in list(islice(shorter, MOST_LOOKED)):
            if len(chosen) >= min(places, MOST - first.overtaken):
                break
            there = self._stores.there(state)
            if there is False:
                del self._found[state.request_id]
            elif there and (free := free - self._stores.blocks_for(state)) >= 0:
                chosen.append(state)
        if not chosen:
            return False
        first.overtaken += len(chosen)
        for state in chosen:
            del self._found[state.request_id]
            state.went_ahead = True
        front = [state.request for state in (*before, *chosen)]
        queue.remove_requests(front)
        for request in reversed(front):
            queue.prepend_request(request)
        return True


def _rest(state: RequestState) -> int:
    """Tokens behind a request's point."""
    assert state.key is not None
    return state.request.num_tokens - state.key.point

"""What of an evicting request vLLM's offload may store and load, and what must be copied first."""

from collections.abc import Iterable
from math import lcm
from typing import TYPE_CHECKING

from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.table import RequestTable
from vllm_kvevict.schedule.step_plan import Eviction, StoreCopy

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        RequestOffloadState,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.v1.request import Request

MOST_STORED = "max_offload_tokens"
"""What a client may set in ``kv_transfer_params``: how many of its tokens are stored."""


class OffloadedBlocks:
    """Bounds vLLM's offload to what an evicting request computed over all of its cache.

    Host memory holds full blocks under their ordinary hashes, as the prefix cache does. So a load
    stops where a prefix-cache hit would, and nothing is stored that was computed over a store.
    vLLM copies a step's blocks in the step after it, and an eviction writes to blocks at its own
    step's end: copies of these are finished first.

    Args:
        connector: vLLM's, the scheduler's half.
        table: All requests.

    """

    def __init__(self, connector: "OffloadingConnector", table: RequestTable) -> None:
        self._scheduler = connector.scheduler
        self._table = table
        self._chunk = lcm(*(g.tokens_per_chunk for g in self._scheduler.config.kv_group_configs))
        connector._max_loadable_tokens = self._most_loaded
        self.paused = False
        """Whether nothing is loaded in the coming step."""

    def _most_loaded(self, request: "Request", num_computed_tokens: int) -> int | None:
        """Tokens that a load may add to the ``num_computed_tokens`` of a hit; None for any."""
        if self.paused:
            return 0
        state = self._table.states.get(request.request_id)
        if state is None or not state.evicts:
            return None
        if state.reuse is not None:
            return 0
        cap = min(state.hit_cap, request.num_tokens - 1)
        return max(0, cap // self._chunk * self._chunk - num_computed_tokens)

    def begin(self, state: RequestState) -> None:
        """A request may be admitted next, with the store that it reuses or without one."""
        status = self._status(state.request_id)
        if status is not None:
            status.max_offload_tokens = 0 if state.reuse is not None else _asked(status)

    def settle(self, evictions: Iterable[Eviction]) -> set[int]:
        """Copies that must be finished before these evictions of the step that is scheduled.

        What the requests compute from now on is not stored. Those of others count as well where
        they read blocks that are free since, and that survivors go to.
        """
        pending, jobs = self._scheduler._block_id_to_pending_jobs, set[int]()
        for eviction in evictions:
            status = self._status(eviction.request_id)
            if status is not None:
                status.max_offload_tokens = 0
                jobs |= status.transfer_jobs
            for group in eviction.groups:
                for block in (*group.positional, *group.store):
                    jobs |= pending.get(block, set())
        return jobs

    def settle_first(self, loads: Iterable[StoreCopy]) -> set[int]:
        """Copies that must be finished before stores come back into blocks that they read.

        Requests that ended gave these blocks back, and vLLM does not know who has them.
        """
        pending = self._scheduler._block_id_to_pending_jobs
        blocks = (block for copy in loads for group in copy.groups for block in group.blocks)
        return {job for block in blocks for job in pending.get(block, ())}

    def _status(self, request_id: str) -> "RequestOffloadState | None":
        return self._scheduler._req_status.get(request_id)


def _asked(status: "RequestOffloadState") -> int | None:
    """The bound that the client set, as vLLM reads it."""
    asked = (status.req.kv_transfer_params or {}).get(MOST_STORED)
    return asked if type(asked) is int and asked >= 0 else None

"""What of an evicting request vLLM's offload may store and load, and what must be copied first."""

from collections.abc import Iterable, Mapping
from math import lcm
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.part import Part
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.timeline.step_plan import Eviction, StepPlan, StoreCopy

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        RequestOffloadState,
    )
    from vllm.v1.request import Request

MOST_STORED = "max_offload_tokens"
"""What a client may set in ``kv_transfer_params``: how many of its tokens are stored."""


class OffloadGuard(Part):
    """Bounds vLLM's offload to what an evicting request computed over all of its cache.

    Host memory holds full blocks under their ordinary hashes, as the prefix cache does. So a load
    stops where a prefix-cache hit would, and nothing is stored that was computed over a store.
    vLLM copies a step's blocks in the step after it, and an eviction writes to blocks at its own
    step's end: copies of these are finished first.

    Args:
        core: The engine, whose scheduler has vLLM's offload as its connector.

    Raises:
        ValueError: In one sentence, why this model's blocks cannot be offloaded.

    """

    def __init__(self, core: EvictionCore) -> None:
        connector = core.scheduler.connector
        assert isinstance(connector, OffloadingConnector)
        if len(core.scheduler.kv_cache_config.kv_cache_groups) > len(core.managers):
            raise ValueError(
                "KV eviction: --kv-offloading-size has not been tried with models some of whose "
                "layers do not evict; remove it or serve without --kv-eviction."
            )
        self._scheduler = connector.scheduler
        self._table = core.table
        self._chunk = lcm(*(g.tokens_per_chunk for g in self._scheduler.config.kv_group_configs))
        connector._max_loadable_tokens = self._most_loaded
        self._paused = False
        """Whether nothing is loaded in the coming step."""

    def _most_loaded(self, request: "Request", num_computed_tokens: int) -> int | None:
        """Tokens that a load may add to the ``num_computed_tokens`` of a hit; None for any."""
        if self._paused:
            return 0
        state = self._table.states.get(request.request_id)
        if state is None or not state.evicts:
            return None
        if state.pending_store is not None:
            return 0
        cap = min(state.hit_cap, request.num_tokens - 1)
        return max(0, cap // self._chunk * self._chunk - num_computed_tokens)

    def looked_up(self, state: RequestState) -> None:
        """Bound what is stored of a request that may be admitted next, over a store or not."""
        status = self._status(state.request_id)
        if status is not None:
            status.max_offload_tokens = 0 if state.pending_store is not None else _asked(status)

    def plan(self, plan: StepPlan, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Name the copies that must be finished before the step's evictions and loads."""
        plan.settle = self.settle(plan.evictions)
        plan.settle_first = self.settle_first(plan.loads)
        self._paused = False

    def before_reset(self, running: bool) -> None:
        """Load nothing in the coming step if running requests are preempted.

        The step names them as preempted, and vLLM ends if it loads for one.
        """
        self._paused |= running

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

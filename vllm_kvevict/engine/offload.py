"""Limits on vLLM's offload for evicting requests, and the copies that must finish first."""

from collections.abc import Callable, Iterable, Mapping
from math import lcm
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.part import Part
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.rules.step_plan import Eviction, StepPlan, StoreCopy

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        RequestOffloadState,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

MAX_OFFLOAD_TOKENS_KEY = "max_offload_tokens"
"""Key in ``kv_transfer_params`` by which a client limits how many of its tokens are stored."""


class OffloadGuard(Part):
    """Limits vLLM's offload to tokens that a request computed over its whole cache.

    Host memory holds full blocks under their ordinary hashes, like the prefix cache. A load
    therefore stops where a prefix-cache hit would, and no block that was computed over a store is
    stored. vLLM copies the blocks of a step during the next step, but an eviction writes to blocks
    at the end of its own step. Copies of these blocks are finished first.

    Args:
        core: The engine core.
        connector: vLLM's offload in its scheduler.

    Raises:
        ValueError: The blocks of this model cannot be offloaded; the message is one sentence.

    """

    def __init__(self, core: EvictionCore, connector: OffloadingConnector) -> None:
        if len(core.scheduler.kv_cache_config.kv_cache_groups) > len(core.managers):
            raise ValueError(
                "KV eviction: --kv-offloading-size has not been tested with models that have "
                "layers without eviction; remove it or serve without --kv-eviction."
            )
        self._scheduler = connector.scheduler
        self._table = core.table
        self._chunk = lcm(*(g.tokens_per_chunk for g in self._scheduler.config.kv_group_configs))
        connector._max_loadable_tokens = self._max_loaded
        connector.update_state_after_alloc = self._allocated(connector.update_state_after_alloc)
        self._paused = False
        """True if nothing is loaded in the next step."""

    def _allocated(self, allocated: Callable[..., None]) -> Callable[..., None]:
        """Return ``update_state_after_alloc``, which also finishes copies from blocks that another
        connector loads into.

        vLLM 0.32 finishes the copies from blocks of scheduled requests and of its own loads only;
        0.33 finishes these as well.
        """

        def update_state_after_alloc(
            request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
        ) -> None:
            if not num_external_tokens:
                for ids in blocks.get_block_ids():
                    self._scheduler._current_batch_allocated_block_ids.update(ids)
            allocated(request, blocks, num_external_tokens)

        return update_state_after_alloc

    def _max_loaded(self, request: "Request", num_computed_tokens: int) -> int | None:
        """Return the tokens that a load may add to a hit of ``num_computed_tokens``; None for no
        limit."""
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
        """Limit the tokens that are stored of a waiting request: none if it starts with a store."""
        status = self._status(state.request_id)
        if status is not None:
            status.max_offload_tokens = 0 if state.pending_store is not None else _asked(status)

    def plan(self, plan: StepPlan, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Add to the plan the copies that must finish before the step's evictions and loads."""
        plan.settle = self.settle(plan.evictions)
        plan.settle_first = self.settle_first(plan.loads)
        self._paused = False

    def before_preemptions(self) -> None:
        """Load nothing in the coming step.

        The step lists these requests as preempted, and vLLM fails if it loads blocks for such a
        request.
        """
        self._paused = True

    def before_reset(self, running: bool) -> None:
        self._paused |= running

    def settle(self, evictions: Iterable[Eviction]) -> set[int]:
        """Return the copies that must finish before these evictions of the scheduled step.

        Tokens that the requests compute from now on are not stored. Copies of other requests count
        if they read blocks that were freed since and that survivors are written to.
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
        """Return the copies that must finish before stores are loaded into blocks that they read.

        Requests that ended returned these blocks, and vLLM does not track their new owner.
        """
        pending = self._scheduler._block_id_to_pending_jobs
        blocks = (block for copy in loads for group in copy.groups for block in group.blocks)
        return {job for block in blocks for job in pending.get(block, ())}

    def _status(self, request_id: str) -> "RequestOffloadState | None":
        return self._scheduler._req_status.get(request_id)


def _asked(status: "RequestOffloadState") -> int | None:
    """Return the client's limit on stored tokens, as vLLM reads it."""
    asked = (status.req.kv_transfer_params or {}).get(MAX_OFFLOAD_TOKENS_KEY)
    return asked if type(asked) is int and asked >= 0 else None

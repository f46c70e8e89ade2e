"""vLLM's schedulers with eviction, tiers, and vLLM's own offload."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_kvevict.offload.blocks import OffloadedBlocks
from vllm_kvevict.schedule.step_plan import StepPlan
from vllm_kvevict.tiers.scheduler import TieredMixin

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class OffloadMixin(TieredMixin):
    """Keeps vLLM's offload right beside evictions, where it is on.

    Raises:
        ValueError: In one sentence, why this model's blocks cannot be offloaded.

    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offloaded: OffloadedBlocks | None = None
        if self.connector is None:
            return
        if len(self.kv_cache_config.kv_cache_groups) > len(self._evicting):
            raise ValueError(
                "KV eviction: --kv-offloading-size has not been tried with models some of whose "
                "layers do not evict; remove it or serve without --kv-eviction."
            )
        assert isinstance(self.connector, OffloadingConnector)
        self._offloaded = OffloadedBlocks(self.connector, self._table)

    def _get_local_prefix_cache_hit(
        self, request: "Request", *args: Any, **kwargs: Any
    ) -> tuple["KVCacheBlocks", int, int, bool]:
        hit = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        state = self._table.states.get(request.request_id)
        if self._offloaded is not None and state is not None:
            self._offloaded.begin(state)
        return hit

    def _plan(self, num_scheduled_tokens: dict[str, int]) -> StepPlan:
        plan = super()._plan(num_scheduled_tokens)
        if self._offloaded is not None:
            plan.settle = self._offloaded.settle(plan.evictions)
            plan.settle_first = self._offloaded.settle_first(plan.loads)
            self._offloaded.paused = False
        return plan

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        # The coming step names running requests as preempted, and vLLM ends if it loads for one.
        if self._offloaded is not None:
            self._offloaded.paused |= reset_running_requests
        return super().reset_prefix_cache(reset_running_requests, reset_connector)


class OffloadingScheduler(OffloadMixin):
    """vLLM's synchronous scheduler with eviction and offload."""


class OffloadingAsyncScheduler(OffloadMixin, AsyncScheduler):
    """vLLM's async scheduler with eviction and offload."""

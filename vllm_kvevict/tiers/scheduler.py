"""vLLM's schedulers with eviction and with tiers behind the KV cache."""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.scheduler import EvictionMixin
from vllm_kvevict.metrics.report import MEASURED
from vllm_kvevict.policies.requirements import page_channels
from vllm_kvevict.schedule.step_plan import PLAN, StepPlan
from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.handover import TAKEN_OVER
from vllm_kvevict.settings.store_tiers import parse_size
from vllm_kvevict.stores.fingerprint import store_files
from vllm_kvevict.stores.shape import StoreSizes
from vllm_kvevict.tiers.overtaking import Overtaking
from vllm_kvevict.tiers.stores import TieredStores

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class TieredMixin(EvictionMixin):
    """Keeps published stores outside the KV cache as well."""

    _overtaking: Overtaking | None = None

    def _make_stores(self, core: EvictionCore, enabled: bool, config: EvictionConfig) -> Any:
        """The stores.

        Raises:
            ValueError: In one sentence, why this server shares none.

        """
        if not config.has_tiers:
            return super()._make_stores(core, enabled, config)
        groups = dict(enumerate(self.kv_cache_config.kv_cache_groups))
        if (
            not enabled
            or not self.cache_config.enable_prefix_caching
            or len(groups) > len(self._evicting)
        ):
            raise ValueError(
                "KV eviction: --kv-eviction-store-memory and --kv-eviction-store-path keep stores "
                "that requests share, and this server shares none: it needs prefix caching, layers "
                "that all evict, and no draft model."
            )
        sizes = StoreSizes(
            {group: one.kv_cache_spec for group, one in groups.items()},
            {group: len(one.layer_names) for group, one in groups.items()},
            page_channels(config),
            pinned=self.vllm_config.device_config.device_type == "cuda",
        )
        stores = TieredStores(
            core,
            sizes,
            self.vllm_config.parallel_config.world_size,
            parse_size(config.store_memory),
            store_files(self.vllm_config, self.kv_cache_config, config),
        )
        self._overtaking = Overtaking(self, core.table, stores)
        return stores

    def add_request(self, request: "Request") -> None:
        known = request.request_id in self._table.states
        super().add_request(request)
        if self._overtaking is not None and not known:
            self._overtaking.arrive(self._table.states[request.request_id])

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        if self._overtaking is not None:
            self._overtaking.begin_step()
        return super().schedule(*args, **kwargs)

    def _handle_blocked_waiting_request(self, request: "Request") -> bool:
        state = self._table.states[request.request_id]
        if self._overtaking is not None and self._overtaking.holds_back(state):
            return False
        return super()._handle_blocked_waiting_request(request)

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        stores = self._stores
        if isinstance(stores, TieredStores):
            plan: StepPlan | None = getattr(scheduler_output, PLAN, None)
            if plan is not None:
                stores.executed(plan)
            for news in getattr(model_runner_output, MEASURED, {}).get("stores", ()):
                stores.heard(news)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_request(self, request: "Request", *args: Any, **kwargs: Any) -> Any:
        state, stores = self._table.states[request.request_id], self._stores
        handed = False
        if isinstance(stores, TieredStores):
            handed = stores.hands_over(state)
            stores.leave(state)
        params, other = super()._free_request(request, *args, **kwargs)
        return (dict(TAKEN_OVER) if handed else params), other


class TieredScheduler(TieredMixin):
    """vLLM's synchronous scheduler with eviction and tiers."""


class TieredAsyncScheduler(TieredMixin, AsyncScheduler):
    """vLLM's async scheduler with eviction and tiers."""

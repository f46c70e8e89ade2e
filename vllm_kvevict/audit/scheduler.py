"""vLLM's schedulers with eviction, and with all that is optional around it."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvevict.audit.replays import Replays
from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.offload.scheduler import OffloadMixin
from vllm_kvevict.schedule.step_plan import PLAN, StepPlan
from vllm_kvevict.settings.audit_share import parse_share
from vllm_kvevict.settings.config import EvictionConfig


class AuditedMixin(OffloadMixin):
    """Has some evictions replayed."""

    def _make_stores(self, core: EvictionCore, enabled: bool, config: EvictionConfig) -> Any:
        """The stores; what replays needs them.

        Raises:
            ValueError: In one sentence, why this server cannot replay.

        """
        stores = super()._make_stores(core, enabled, config)
        groups = self.kv_cache_config.kv_cache_groups
        if not stores.enabled:
            raise ValueError(
                "KV eviction: --kv-eviction-audit replays tokens over blocks that requests share, "
                "and this server shares none: it needs prefix caching, layers that all evict, and "
                "no draft model."
            )
        if not self.log_stats:
            raise ValueError(
                "KV eviction: --kv-eviction-audit reports through vLLM's statistics; remove "
                "--disable-log-stats or it."
            )
        layers = {group: len(groups[group].layer_names) for group in core.managers}
        self._replays = Replays(core, parse_share(config.audit), layers)
        return stores

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planner.before_deferring = self._replays.let_go

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if (state := self._table.states.get(request.request_id)) is not None:
            self._replays.draw(state)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._replays.begin_step()
        return super().schedule(*args, **kwargs)

    def _plan(self, num_scheduled_tokens: dict[str, int]) -> StepPlan:
        heard = self._replays.listen(num_scheduled_tokens)
        plan = super()._plan(num_scheduled_tokens)
        plan.heard = heard
        self._replays.plan(plan, num_scheduled_tokens)
        return plan

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args)
        plan: StepPlan | None = getattr(scheduler_output, PLAN, None)
        if plan is not None:
            self._replays.start(plan)
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._replays.reset()
        return super().reset_prefix_cache(*args, **kwargs)


class AuditedScheduler(AuditedMixin):
    """vLLM's synchronous scheduler with eviction, offload and audits."""


class AuditedAsyncScheduler(AuditedMixin, AsyncScheduler):
    """vLLM's async scheduler with eviction, offload and audits."""

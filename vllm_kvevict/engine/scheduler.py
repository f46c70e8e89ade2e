"""vLLM's schedulers with eviction: where planning, prefix caps, reports and totals hook in."""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvevict.engine.budgets import report_budgets
from vllm_kvevict.engine.grants import StoreGrants
from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.engine.options import options_of
from vllm_kvevict.engine.planner import EVICTED, StepPlanner
from vllm_kvevict.engine.points import EvictionPoints
from vllm_kvevict.engine.prefix import PrefixCaps
from vllm_kvevict.engine.preparing import Preparations
from vllm_kvevict.engine.pressure import Pressure
from vllm_kvevict.engine.registration import register_spec
from vllm_kvevict.engine.reports import StepReports
from vllm_kvevict.engine.rings import RingSlots
from vllm_kvevict.engine.sharing import SharedStores
from vllm_kvevict.engine.stores import Stores
from vllm_kvevict.engine.totals import TotalsLog
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.metrics.report import Reporter
from vllm_kvevict.policies.needs import ring_slots, shares_stores
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.schedule.step_plan import PLAN, StepPlan
from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.names import KEY
from vllm_kvevict.settings.requests import RequestOptions

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request


class EvictionMixin(Scheduler):
    """Plans evictions around vLLM's own scheduling, which it leaves as it is.

    Who evicts is settled when a step is scheduled as a whole: who shares blocks with whom is
    known then. The survivors get fresh blocks where running requests still find their next ones,
    and go into blocks of their own request elsewhere.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register_spec()
        super().__init__(*args, **kwargs)
        config = EvictionConfig.parse(self.vllm_config.additional_config.get(KEY))
        coordinator = self.kv_cache_manager.coordinator
        managers: dict[int, EvictableAttentionManager] = {
            manager.kv_cache_group_id: manager
            for manager in coordinator.single_type_managers
            if isinstance(manager, EvictableAttentionManager)
        }
        if config is None or not managers:
            raise RuntimeError(
                "The KV eviction scheduler was started without an evictable KV-cache group."
            )
        report_budgets(self.vllm_config, config, max(m.block_size for m in managers.values()))
        self.eviction_counters = counters = Counters()
        self._config = config
        self._evicting = managers
        self._ledger = ledger = self._make_ledger()
        for manager in managers.values():
            manager.ledger = ledger
            if ledger.evicts_shared:
                StoreGrants(manager, ledger)
        self._points = EvictionPoints(ledger, managers)
        stores = Stores(self, ledger, managers, counters)
        self._pressure = Pressure(
            self, ledger, managers, stores, counters, config.low_mark, config.high_mark
        )
        self._shared = shared = self._make_shared()
        self._preparations = Preparations(self.requests, self.add_request, ledger, shared, counters)
        self._planner = StepPlanner(self.requests, ledger, managers, stores, shared, counters)
        self._prefix = PrefixCaps(self.kv_cache_manager, ledger, shared, counters)
        self._reports: StepReports | None = None
        if self.log_stats:
            groups = self.kv_cache_config.kv_cache_groups
            layers = {group: len(groups[group].layer_names) for group in managers}
            self._reports = StepReports(
                Reporter(counters), ledger, managers, layers, shared, self._pressure.marks
            )
        # Else the front end's periodic line says it.
        several = self.vllm_config.parallel_config._api_process_count > 1
        self._totals = TotalsLog(counters, periodic=several or not self.log_stats)
        self._aligns_mamba: bool = self.need_mamba_block_aligned_split

    def _make_ledger(self) -> EvictionLedger:
        slots = ring_slots(self.vllm_config, self._config)
        policies = build_policies(self._config).items()
        rules = {group: manager.timeline for group, manager in self._evicting.items()}
        return EvictionLedger(
            self.requests,
            {group: rule for group, rule in rules.items() if rule is not None},
            RingSlots(slots) if slots else None,
            self.max_model_len,
            self._options,
            windowless=frozenset(n for n, p in policies if not p.needs_window),
            accumulating=frozenset(n for n, p in policies if p.needs_accumulated),
            evicts_shared=self._config.shared_blocks == "evict",
            tokens_a_step=1 + self.num_spec_tokens,
        )

    def _make_shared(self) -> SharedStores:
        policies = build_policies(self._config)
        return SharedStores(
            self.kv_cache_manager,
            self._ledger,
            self._evicting,
            unshared=frozenset(n for n, p in policies.items() if not shares_stores(p)),
            enabled=not (self.connector or self.use_eagle or self.prefix_replay_tokens),
        )

    def _options(self, request: "Request") -> RequestOptions:
        return options_of(request, self._config, list(self._ledger.rules.values()))

    def add_request(self, request: "Request") -> None:
        super().add_request(request)
        options = self._options(request)
        if options.at is not None or any(
            options.timeline(rule).prefill_stride for rule in self._ledger.rules.values()
        ):
            self._points.add(request.request_id)
            self._preparations.ask(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._preparations.begin()
        self._pressure.prepare()
        pointed = self._points.any_alive(self.requests)
        self.need_mamba_block_aligned_split = self._aligns_mamba or pointed
        return super().schedule(*args, **kwargs)

    def _mamba_block_aligned_split(
        self,
        request: "Request",
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Clip a chunk of prefill so that it ends at the request's eviction point.

        vLLM asks here, where it has chosen a chunk, while ``need_mamba_block_aligned_split``.
        """
        if self._aligns_mamba:
            num_new_tokens = super()._mamba_block_aligned_split(
                request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
            )
        start = (
            request.num_computed_tokens
            + num_new_local_computed_tokens
            + num_external_computed_tokens
        )
        return self._points.clip(request.request_id, start, start + num_new_tokens) - start

    def update_draft_token_ids(self, draft_token_ids: "DraftTokenIds") -> None:
        """Drop drafts from the steps whose queries they would spoil, and that evict."""
        super().update_draft_token_ids(draft_token_ids)
        for request_id in draft_token_ids.req_ids:
            request, entry = self.requests.get(request_id), self._ledger.entries.get(request_id)
            if request is not None and entry is not None:
                del request.spec_token_ids[entry.most_drafts(request.num_tokens) :]

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self._ledger.admit(new.req_id)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._ledger.admit(request_id)
        self._pressure.call(scheduler_output.num_scheduled_tokens)
        plan = self._planner.plan(scheduler_output.num_scheduled_tokens)
        if self._reports is not None:
            self._reports.planned(plan)
        super()._update_after_schedule(scheduler_output)
        if plan:
            setattr(scheduler_output, PLAN, plan)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        plan: StepPlan | None = getattr(scheduler_output, PLAN, None)
        if plan is not None:
            self._planner.retire(plan)
        if self._reports is not None:
            self._reports.send(model_runner_output, outputs)
        self._totals.tick(idle=not self.requests)
        return outputs

    def _free_request(self, request: "Request", *args: Any, **kwargs: Any) -> Any:
        if request.num_computed_tokens:
            self.eviction_counters.ended(getattr(request, EVICTED, False))
        if self._reports is not None:
            self._reports.ended(request)
        entry = self._ledger.entries.get(request.request_id)
        freed = super()._free_request(request, *args, **kwargs)
        if entry is not None and entry.shared is not None:
            self._shared.renew(entry.shared)
        return freed

    def _get_local_prefix_cache_hit(
        self, request: "Request"
    ) -> tuple["KVCacheBlocks", int, int, bool]:
        return self._prefix.capped(request, super()._get_local_prefix_cache_hit)

    def _handle_blocked_waiting_request(self, request: "Request") -> bool:
        ready = super()._handle_blocked_waiting_request(request)
        if not ready or self._preparations.waits(request):
            return False
        return not self._shared.waits(request, self.running)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> "list[Request]":
        finished = super().finish_requests(request_ids, finished_status)
        self._totals.tick(idle=not self.requests)
        return finished

    def shutdown(self) -> None:
        self._totals.close()
        super().shutdown()


class EvictingScheduler(EvictionMixin):
    """vLLM's synchronous scheduler with eviction."""


class EvictingAsyncScheduler(EvictionMixin, AsyncScheduler):
    """vLLM's async scheduler with eviction."""

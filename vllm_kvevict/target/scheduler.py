"""vLLM's schedulers with eviction, all that is optional around it, and budgets by target."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from vllm_kvevict.audit.replays import words_alone
from vllm_kvevict.audit.scheduler import AuditedMixin
from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.metrics.report import MEASURED, Audited
from vllm_kvevict.schedule.step_plan import StepPlan
from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.own_target import BUDGET, TARGET
from vllm_kvevict.settings.requests import RequestOptions, parse_options
from vllm_kvevict.target.choice import Targets
from vllm_kvevict.target.estimate import Estimate
from vllm_kvevict.target.ladder import Ladder, build
from vllm_kvevict.target.stairs import Stairs

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

ANSWER = "kv_eviction"
"""Key of vLLM's ``kv_transfer_params`` of an answer that holds what its request came to."""


class TargetMixin(AuditedMixin):
    """Chooses the budget of requests by what it loses."""

    max_num_active_reqs: int

    def _make_stores(self, core: EvictionCore, enabled: bool, config: EvictionConfig) -> Any:
        stores = super()._make_stores(core, enabled, config)
        self._core = core
        estimate, places = Estimate(config), self.max_num_active_reqs
        self._targets = Targets(core, self._replays, stores, estimate, places)
        self._targets.reporter = self._reporter
        return stores

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stairs = Stairs(self._core, self._memory, self._turns, self._replays)
        self._targets.stairs, self._memory.may_lower = stairs, lambda: stairs.may_lower

    def _options(self, request: "Request") -> RequestOptions:
        options = super()._options(request)
        if options.target is None:
            return options
        ladder = self._ladder(request, options)
        # Too short a prompt, or none that can be computed again: the server's budget.
        return replace(options, target=None) if ladder is None else self._targets.arrive(ladder)

    def _ladder(self, request: "Request", options: RequestOptions) -> Ladder | None:
        if request.resumable or request.pooling_params is not None or not words_alone(request):
            return None
        table, params = self._table, request.sampling_params
        assert params is not None
        needs = table.needs[options.policy]
        if needs.accumulates_attention or needs.weighs:
            return None
        prompt, rules = request.num_prompt_tokens, list(table.rules.values())
        asked = {k: v for k, v in (params.extra_args or {}).items() if k != TARGET}

        def read(share: str) -> RequestOptions:
            return parse_options(table.config, asked | {BUDGET: share}, prompt, rules)

        longest = min(prompt + request.max_tokens, self.max_model_len)
        hashed = self.kv_cache_manager.block_pool.hash_block_size
        capped = table.config.max_budget is not None
        return build(request, options, read, table.rules, longest, hashed, capped)

    def add_request(self, request: "Request") -> None:
        super().add_request(request)
        if (state := self._table.states.get(request.request_id)) is not None:
            self._targets.begin(state)

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        self._targets.begin_step()
        self.max_num_active_reqs = self._targets.places
        return super().schedule(*args, **kwargs)

    def _mamba_block_aligned_split(
        self, request: "Request", num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Clip a chunk of a request whose budget is not chosen so that it ends before its window.

        vLLM asks here, where it has chosen a chunk.
        """
        asked = super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
        start = request.num_computed_tokens + sum(args) + sum(kwargs.values())
        running = request.status == RequestStatus.RUNNING
        return self._targets.clip(request.request_id, start, start + asked, running) - start

    def _get_local_prefix_cache_hit(self, request: "Request", *args: Any, **kwargs: Any) -> Any:
        state = self._table.states.get(request.request_id)
        if state is None or not state.trial:
            return super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        request.skip_reading_prefix_cache = False
        hit = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        # vLLM counts no look-up then, and loads nothing for it.
        request.skip_reading_prefix_cache = True
        return hit

    def _plan(self, num_scheduled_tokens: dict[str, int]) -> StepPlan:
        plan = super()._plan(num_scheduled_tokens)
        self._targets.planned(plan, num_scheduled_tokens)
        return plan

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> Any:
        heard = self._of_trials(getattr(model_runner_output, MEASURED, None))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request_id, _, _, nats, _ in heard:
            self._targets.heard(request_id, nats)
        return outputs

    def _of_trials(self, measured: dict[str, Any] | None) -> list[Audited]:
        """What trials said, which no audit of clients' requests has."""
        audits: list[Audited] = (measured or {}).get("audits", [])
        trials = [one for one in audits if self._targets.trials.is_trial(one[0])]
        if measured is not None and trials:
            measured["audits"] = [one for one in audits if one not in trials]
        return trials

    def _preempt_request(self, request: "Request", *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._targets.stairs.preempted(request.request_id)

    def _free_request(self, request: "Request", *args: Any, **kwargs: Any) -> Any:
        params, other = super()._free_request(request, *args, **kwargs)
        told = self._targets.told(request.request_id)
        return (params if told is None else {**(params or {}), ANSWER: told}), other

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._targets.reset()
        return super().reset_prefix_cache(*args, **kwargs)


class TargetScheduler(TargetMixin):
    """vLLM's synchronous scheduler with eviction, offload, audits and targets."""


class TargetAsyncScheduler(TargetMixin, AsyncScheduler):
    """vLLM's async scheduler with eviction, offload, audits and targets."""

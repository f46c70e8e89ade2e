"""vLLM's schedulers with eviction: who evicts in which step, and telling the workers."""

import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvevict.engine.ledger import Entry, EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.engine.rings import RingSlots
from vllm_kvevict.engine.spec import register_spec
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.metrics.kept import kept_share
from vllm_kvevict.metrics.report import MEASURED, Reporter, attach
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.schedule.step_plan import PLAN, Eviction, StepPlan
from vllm_kvevict.schedule.timeline import blocks_for
from vllm_kvevict.settings.config import KEY, EvictionConfig
from vllm_kvevict.settings.requests import RequestOptions, parse_options
from vllm_kvevict.settings.sizing import ring_slots

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kv_eviction.scheduler")

LOG_INTERVAL_S = 10.0

OPTIONS = "_kv_eviction_options"
"""Attribute of vLLM's ``Request`` that keeps what it asked for, read once."""


class EvictionMixin(Scheduler):
    """Plans evictions around vLLM's own scheduling, which it leaves as it is.

    Prefill evictions are admitted with their step (the block manager counts the store).
    Decode evictions take a store from free blocks before the step is scheduled, and only
    where every running request still finds its next block; else they are postponed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register_spec()
        super().__init__(*args, **kwargs)
        config = EvictionConfig.parse(self.vllm_config.additional_config.get(KEY))
        coordinator = self.kv_cache_manager.coordinator
        self._evicting: dict[int, EvictableAttentionManager] = {
            manager.kv_cache_group_id: manager
            for manager in coordinator.single_type_managers
            if isinstance(manager, EvictableAttentionManager)
        }
        if config is None or not self._evicting:
            raise RuntimeError(
                "The KV eviction scheduler was started without an evictable KV-cache group."
            )
        self.eviction_counters = Counters()
        self._config = config
        slots = ring_slots(self.vllm_config, config)
        policies = build_policies(config).items()
        windowless = frozenset(n for n, p in policies if not p.needs_window)
        accumulating = frozenset(n for n, p in policies if p.needs_accumulated)
        rules = {group: manager.timeline for group, manager in self._evicting.items()}
        self._ledger = EvictionLedger(
            self.requests,
            {group: rule for group, rule in rules.items() if rule is not None},
            RingSlots(slots) if slots else None,
            coordinator.single_type_managers,
            self.max_model_len,
            self._options,
            windowless,
            accumulating,
        )
        self._pointed: set[str] = set()
        self._aligns_mamba: bool = self.need_mamba_block_aligned_split
        for manager in self._evicting.values():
            manager.ledger = self._ledger
        # All groups, also those that do not evict, publish blocks through the coordinator.
        publish = coordinator.cache_blocks

        def cache_blocks(request: "Request", num_computed_tokens: int) -> None:
            publish(request, self._ledger.cacheable(request.request_id, num_computed_tokens))

        coordinator.cache_blocks = cache_blocks
        self._logged = (time.monotonic(), "")
        groups = self.kv_cache_config.kv_cache_groups
        self._layers = {group: len(groups[group].layer_names) for group in self._evicting}
        self._reporter = Reporter(self.eviction_counters) if self.log_stats else None
        # Else the front end's periodic line says it.
        several = self.vllm_config.parallel_config._api_process_count > 1
        self._logs_periodically = several or not self.log_stats

    def _options(self, request: "Request") -> RequestOptions:
        """What a request asked for, read once."""
        options: RequestOptions | None = getattr(request, OPTIONS, None)
        if options is None:
            sampling = request.sampling_params
            extra = sampling.extra_args if sampling is not None else None
            try:
                rules = list(self._ledger.rules.values())
                options = parse_options(self._config, extra, request.num_prompt_tokens, rules)
            except ValueError as error:
                # Refused at the front door; only a client of the engine core gets here.
                logger.warning("%s: the server's settings apply (%s)", request.request_id, error)
                options = RequestOptions(self._config.policy)
            setattr(request, OPTIONS, options)
        return options

    def add_request(self, request: "Request") -> None:
        super().add_request(request)
        if self._options(request).at is not None:
            self._pointed.add(request.request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._pointed:
            self._pointed &= self.requests.keys()
        self.need_mamba_block_aligned_split = self._aligns_mamba or bool(self._pointed)
        self._reserve_stores()
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
        request_id = request.request_id
        if request_id not in self._pointed:
            return num_new_tokens
        start = (
            request.num_computed_tokens
            + num_new_local_computed_tokens
            + num_external_computed_tokens
        )
        return self._clip(request_id, start, start + num_new_tokens) - start

    def _clip(self, request_id: str, start: int, end: int) -> int:
        """Where a chunk of prefill over [start, end) ends."""
        entry = self._ledger.entry(request_id)
        point = entry.point if entry is not None else None
        if entry is None or point is None:
            return end
        if start < point:
            return min(end, point)
        # Blocks of the eviction are free once its step was processed; whoever cannot go on
        # without them would be preempted, and would come back here without end.
        waits = entry.in_prefill(end) and any(
            manager.retiring(request_id) for manager in self._evicting.values()
        )
        return start if waits else end

    def _reserve_stores(self) -> None:
        """Grant stores to decode evictions that would run in the coming step."""
        headroom = -1
        entries = self._ledger.entries
        for request in self.running:
            entry = entries.get(request.request_id)
            start = request.num_computed_tokens
            if entry is None or start < entry.quiet_until or request.is_prefill_chunk:
                continue
            groups = self._runnable(request.request_id, entry, start, start + 1)
            if not groups:
                continue
            if headroom < 0:
                headroom = sum(map(self._next_blocks, self.running))
            self._grant(request.request_id, entry, groups, headroom)

    def _next_blocks(self, request: "Request") -> int:
        """Most blocks that a running request takes in the coming step."""
        start = request.num_computed_tokens
        end, store = start + 1, 0
        if request.is_prefill_chunk:
            end = min(request.num_tokens, start + self.max_num_scheduled_tokens)
            if request.request_id in self._pointed:
                end = self._clip(request.request_id, start, end)
            if (entry := self._ledger.entries.get(request.request_id)) is not None:
                store = sum(entry.timelines[g].store_blocks for g in entry.due_groups(end))
        return store + sum(
            blocks_for(end, size) - blocks_for(start, size)
            for size in self.kv_cache_manager.coordinator.group_block_sizes
        )

    def _runnable(self, request_id: str, entry: Entry, start: int, end: int) -> list[int]:
        """Groups that should evict with a step over [start, end), if they get a store."""
        groups = entry.due_groups(end)
        if (
            not groups
            or self._ledger.last_step(request_id, end)
            or not self._ledger.window_ready(entry, start, end)
        ):
            return []
        return groups

    def _grant(self, request_id: str, entry: Entry, groups: list[int], headroom: int) -> bool:
        """Grant a store to every one of the groups, or to none."""
        missing = [g for g in groups if not self._evicting[g].granted(request_id)]
        blocks = sum(entry.timelines[g].store_blocks for g in missing)
        if self.kv_cache_manager.block_pool.get_num_free_blocks() < blocks + headroom:
            return False
        for group in missing:
            self._evicting[group].grant(request_id, entry)
        return True

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        plan = self._plan(scheduler_output.num_scheduled_tokens)
        super()._update_after_schedule(scheduler_output)
        if plan:
            setattr(scheduler_output, PLAN, plan)

    def _plan(self, num_scheduled_tokens: dict[str, int]) -> StepPlan:
        plan = StepPlan()
        observed: list[tuple[Entry, int]] = []
        for request_id, num_tokens in num_scheduled_tokens.items():
            entry = self._ledger.entries.get(request_id)
            if entry is None:
                continue
            start = self.requests[request_id].num_computed_tokens
            end = start + num_tokens
            if entry.accumulates:
                plan.accumulating.append(request_id)
            if not entry.observes(end):
                continue
            self._ledger.observe(entry, start, end)
            if entry.ring is not None:
                plan.rings[request_id] = entry.ring
            self._plan_eviction(plan, request_id, entry, start, end)
            observed.append((entry, end))
        # Not before: a slot given back within the step would have two writers.
        for entry, end in observed:
            self._ledger.settle(entry, end)
        return plan

    def _plan_eviction(
        self, plan: StepPlan, request_id: str, entry: Entry, start: int, end: int
    ) -> None:
        if not entry.due_groups(end) or self._ledger.last_step(request_id, end):
            return
        groups = self._runnable(request_id, entry, start, end)
        if not groups or not self._grant(request_id, entry, groups, headroom=0):
            self.eviction_counters.postponed += 1
            return
        counters = self.eviction_counters
        if entry.in_prefill(end):
            counters.evictions_prefill += 1
        else:
            counters.evictions_decode += 1
        if self._reporter is not None:
            self._reporter.evicted(entry.policy, entry.in_prefill(end))
        evictions = [self._evicting[g].evict(request_id, entry, end) for g in groups]
        for eviction in evictions:
            bs = self._evicting[eviction.group_id].block_size
            counters.store_blocks_allocated += len(eviction.store)
            counters.tokens_evicted += (
                eviction.tail_start
                - eviction.old_tail_start
                + (len(eviction.old_store) - len(eviction.store)) * bs
            )
        plan.evictions.append(
            Eviction(request_id, end, entry.ring, evictions, entry.policy, entry.protect_first)
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        plan: StepPlan | None = getattr(scheduler_output, PLAN, None)
        for eviction in plan.evictions if plan else ():
            for group in eviction.groups:
                freed = self._evicting[group.group_id].retire(eviction.request_id, group)
                self.eviction_counters.blocks_freed += freed
        if self._reporter is not None:
            self._report(self._reporter, model_runner_output, outputs)
        self._log_if_idle()
        return outputs

    def _report(
        self,
        reporter: Reporter,
        model_runner_output: "ModelRunnerOutput",
        outputs: "dict[int, EngineCoreOutputs]",
    ) -> None:
        """Send what happened since the last report to a front end, with vLLM's statistics."""
        measured = getattr(model_runner_output, MEASURED, None)
        if measured is not None:
            reporter.measured(**measured)
        report = reporter.take(sum(m.blocks_saved for m in self._evicting.values()))
        if report is not None:
            attach(report, outputs)

    def _free_request(self, request: "Request", *args: Any, **kwargs: Any) -> Any:
        # The last sampled token was never fed back, so it is not in the cache.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if self._reporter is not None and tokens > 0:
            entry = self._ledger.entries.get(request.request_id)
            timelines = entry.timelines if entry is not None else {}
            self._reporter.kept(kept_share(timelines, self._layers, tokens))
        return super()._free_request(request, *args, **kwargs)

    def _get_local_prefix_cache_hit(
        self, request: "Request"
    ) -> tuple["KVCacheBlocks", int, int, bool]:
        """Cap the hit: the observation window, and what follows an eviction point, is computed."""
        hit = super()._get_local_prefix_cache_hit(request)
        cap = self._ledger.hit_cap(request)
        if hit[1] <= cap:
            return hit
        self.eviction_counters.prefix_hits_capped += 1
        manager = self.kv_cache_manager
        blocks, num_tokens, uncached = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, cap
        )
        boundary = num_tokens + uncached if uncached else 0
        return manager.create_kv_cache_blocks(blocks), num_tokens, boundary, hit[3]

    def make_stats(self, *args: Any, **kwargs: Any) -> "SchedulerStats | None":
        if self._logs_periodically:
            now = time.monotonic()
            if now - self._logged[0] >= LOG_INTERVAL_S:
                self._log_counters(now)
        return super().make_stats(*args, **kwargs)

    def _log_counters(self, now: float) -> None:
        line = self.eviction_counters.line()
        if line != self._logged[1]:
            logger.info("KV eviction: %s", line)
        self._logged = (now, line)

    def _log_if_idle(self) -> None:
        """Log totals before the last answer goes out.

        With several API servers vLLM kills the engine core at once when it is told to stop, so
        there is no later moment. One line at most for every request that ends.
        """
        counters = self.eviction_counters
        if not self.requests and (counters.evictions or counters.postponed):
            self._log_counters(time.monotonic())

    def finish_requests(self, request_ids: Any, finished_status: Any) -> "list[Request]":
        finished = super().finish_requests(request_ids, finished_status)
        self._log_if_idle()
        return finished


class EvictingScheduler(EvictionMixin):
    """vLLM's synchronous scheduler with eviction."""


class EvictingAsyncScheduler(EvictionMixin, AsyncScheduler):
    """vLLM's async scheduler with eviction."""

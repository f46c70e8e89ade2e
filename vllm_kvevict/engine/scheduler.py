"""vLLM's schedulers with eviction. Each hook calls the engine and its parts."""

from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_kvevict.config.budget_log import report_budgets
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.connectors import connector_names, connectors_of
from vllm_kvevict.config.core_options import read_options
from vllm_kvevict.config.handover import TAKEN_OVER, takes_over
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.config.requests import RequestOptions
from vllm_kvevict.config.store_tiers import parse_size
from vllm_kvevict.engine.blocks import EvictableAttentionManager, EvictionCore, register_spec
from vllm_kvevict.engine.grouped_events import GroupedEvents
from vllm_kvevict.engine.memory_pressure import MemoryPressure
from vllm_kvevict.engine.offload import OffloadGuard
from vllm_kvevict.engine.part import Part
from vllm_kvevict.engine.planner import StepPlanner
from vllm_kvevict.engine.prefix import PrefixCaps
from vllm_kvevict.engine.published import PublishedStore
from vllm_kvevict.engine.remote_prefill import RemotePrefill
from vllm_kvevict.engine.replays import Replays
from vllm_kvevict.engine.ring_queue import RingQueue
from vllm_kvevict.engine.stores import PublishedStores
from vllm_kvevict.engine.table import RequestTable
from vllm_kvevict.engine.tiered_stores import TieredStores
from vllm_kvevict.engine.waiting_queue import WaitingQueue
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.metrics.kept import kept_share
from vllm_kvevict.metrics.report import MEASURED, Reporter, attach
from vllm_kvevict.metrics.totals import TotalsLog
from vllm_kvevict.policies.requirements import floats_per_token, policy_requirements, ring_slots
from vllm_kvevict.rules.ring_slots import RingSlots
from vllm_kvevict.rules.step_plan import PLAN, StepPlan
from vllm_kvevict.stores.fingerprint import store_files
from vllm_kvevict.stores.key import ShareKey
from vllm_kvevict.stores.shape import StoreSizes

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kv_eviction.scheduler")

MAX_PROMPT_EVICTIONS_PER_STEP = 16
"""Maximum number of evictions inside prompts per step. Other chunks that would end with an eviction
wait for the next step, so that decoding requests do not wait for all of them."""


class EvictingScheduler(Scheduler):
    """vLLM's scheduler with evictions, which are planned after vLLM has scheduled a step.

    Only when the whole step is scheduled is it known which requests share which blocks.

    Raises:
        ValueError: The server cannot do what its flags ask for; the message is one sentence.

    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register_spec()
        super().__init__(*args, **kwargs)
        self._waiting_queue = WaitingQueue(self.waiting)
        self.waiting: RequestQueue = self._waiting_queue
        config = EvictionConfig.parse(self.vllm_config.additional_config.get(CONFIG_KEY))
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
        self._evicting = managers
        slots = ring_slots(self.vllm_config, config)
        self._table = table = self._make_table(config, slots)
        self._turns = RingQueue(
            table, RingSlots(slots) if slots else None, 1 + self.num_spec_tokens
        )
        self._core = core = EvictionCore(self, table, self._turns, managers, counters)
        for manager in managers.values():
            manager.core = core
        self._reporter = Reporter(counters) if self.log_stats else None
        self._stores = build_stores(core, config)
        self._parts: list[Part] = []
        self._planner = StepPlanner(core, self._turns, self._stores, self._reporter, self._parts)
        self._memory = MemoryPressure(core, self._turns, self._planner)
        self._prefix = PrefixCaps(core, self._stores)
        self._parts += build_parts(core, config, self._stores)
        self._remote = next((p for p in self._parts if isinstance(p, RemotePrefill)), None)
        groups = self.kv_cache_config.kv_cache_groups
        if len(managers) == len(groups):
            GroupedEvents(core)
        self._layers = {group: len(groups[group].layer_names) for group in managers}
        # Otherwise the front end writes the totals in its periodic line.
        several = self.vllm_config.parallel_config._api_process_count > 1
        self._totals = TotalsLog(counters, periodic=several or not self.log_stats)
        self._inside = 0
        """Evictions inside prompts in the step that is being scheduled."""
        self._aligns_mamba: bool = self.need_mamba_block_aligned_split

    def _make_table(self, config: EvictionConfig, slots: int) -> RequestTable:
        rules = {group: m.rule for group, m in self._evicting.items() if m.rule is not None}
        needs = policy_requirements(config)
        if not slots:
            needs = {
                name: replace(requirements, window="none") for name, requirements in needs.items()
            }
        return RequestTable(rules, needs, config, self.max_model_len)

    def _options(self, request: "Request") -> RequestOptions:
        """Return the settings of a request; the server's settings if it could not run under its
        own."""
        config, rules = self._table.config, list(self._table.rules.values())
        drafts = self.vllm_config.speculative_config is not None
        blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        handed_over = self._remote is not None and self._remote.hands_over(request)
        return read_options(request, config, rules, drafts, self.max_model_len, blocks, handed_over)

    def add_request(self, request: "Request") -> None:
        self._waiting_queue.arrived(request)
        super().add_request(request)
        if request.request_id in self._table.states or request.request_id not in self.requests:
            # A session that continues or has ended, or an internal request.
            return
        state = self._table.add(request, self._options(request))
        self._stores.read_key(state)
        for part in self._parts:
            part.arrived(state)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for part in self._parts:
            part.before_schedule()
        self._core.consider(None)
        for request in self._waiting_queue.return_ready(self._stores.ready(), self._waits):
            self._stores.promise(self._table.states[request.request_id])
        self._core.make_way()
        self._memory.begin_step()
        self._stores.windows.make_room()
        self._planner.hold_back()
        self._inside = 0
        # A request that was set aside has eviction points, and is not scheduled in this step.
        stops = len(self._table.stopping) > self._waiting_queue.num_aside
        self.need_mamba_block_aligned_split = bool(
            self._aligns_mamba or stops or self.num_spec_tokens
        )
        output = super().schedule(*args, **kwargs)
        self._waiting_queue.set_aside()
        return output

    def _waits(self, request: "Request", key: ShareKey) -> bool:
        """Return whether a waiting request still waits for a store, and not for another one."""
        state = self._table.states[request.request_id]
        return self._stores.waits(state) and state.store_key == key

    def _mamba_block_aligned_split(
        self,
        request: "Request",
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Clip a chunk of prefill so that it ends at the request's eviction point.

        vLLM calls this method for every chunk that it has chosen while
        ``need_mamba_block_aligned_split`` is set. If the whole prompt was found in the cache, vLLM
        pads its single token with drafts; the drafts are omitted if they would spoil queries that
        are needed.
        """
        if self._aligns_mamba:
            num_new_tokens = super()._mamba_block_aligned_split(
                request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
            )
        state = self._table.stopping.get(request.request_id)
        if self.num_spec_tokens:
            state = self._table.states.get(request.request_id)
        if state is None or not state.evicts:
            return num_new_tokens
        start = (
            request.num_computed_tokens
            + num_new_local_computed_tokens
            + num_external_computed_tokens
        )
        if request.status != RequestStatus.RUNNING and start + num_new_tokens > request.num_tokens:
            drafts = start + num_new_tokens - request.num_tokens
            if drafts > state.max_drafts(request.num_tokens):
                return request.num_tokens - start
        end = state.clip_chunk(start, start + num_new_tokens)
        if state.evicts_inside(end):
            if self._inside == MAX_PROMPT_EVICTIONS_PER_STEP:
                return 0
            self._inside += 1
        return end - start

    def update_draft_token_ids(self, draft_token_ids: "DraftTokenIds") -> None:
        """Drop drafts from the steps that evict, and from those with queries that drafts would
        spoil."""
        super().update_draft_token_ids(draft_token_ids)
        for request_id in draft_token_ids.req_ids:
            request, state = self.requests.get(request_id), self._table.states.get(request_id)
            if request is not None and state is not None and state.holds_blocks:
                del request.spec_token_ids[state.max_drafts(request.num_tokens) :]

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        tokens = scheduler_output.num_scheduled_tokens
        self._memory.relieve(tokens)
        for part in self._parts:
            part.before_plan(tokens)
        plan = self._planner.plan(tokens)
        for part in self._parts:
            part.plan(plan, tokens)
        super()._update_after_schedule(scheduler_output)
        if self._remote is not None:
            self._remote.scheduled(scheduler_output)
        if plan:
            setattr(scheduler_output, PLAN, plan)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        plan: StepPlan | None = getattr(scheduler_output, PLAN, None)
        measured: dict[str, Any] = getattr(model_runner_output, MEASURED, None) or {}
        lost = self._stores.executed(plan, measured.get("stores", ()))
        self._recompute(lost + self._stores.unscored(measured.get("unscored", ())))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._stores.resolve()
        if self._remote is not None:
            self._remote.loads.processed(scheduler_output)
        if plan is not None:
            self._planner.free_replaced(plan)
        self._stores.sweep()
        if self._reporter is not None:
            self._report(self._reporter, model_runner_output, outputs)
        self._totals.tick(idle=not self.requests)
        if plan is not None:
            for part in self._parts:
                part.after_step(plan)
        return outputs

    def _recompute(self, lost: list[PublishedStore]) -> None:
        """Discard what requests computed over stores that could not be restored.

        They are preempted, and the output of their steps in flight is dropped, as in a reset of the
        prefix cache.
        """
        if not lost:
            return
        for part in self._parts:
            part.before_preemptions()
        for request in reversed(self.running.copy()):
            if self._table.states[request.request_id].reused_store in lost:
                self.running.remove(request)
                self._preempt_request(request, monotonic(), drop_stale_output=True)
                self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _report(
        self,
        reporter: Reporter,
        model_runner_output: "ModelRunnerOutput",
        outputs: "dict[int, EngineCoreOutputs]",
    ) -> None:
        """Send the events since the last report to a front end, with vLLM's statistics."""
        if (measured := getattr(model_runner_output, MEASURED, None)) is not None:
            reporter.measured(**measured)
        marks = self._memory.watermarks
        saved = sum(m.blocks_saved for m in self._evicting.values())
        stores = self._stores.idle, self._stores.kept_bytes
        report = reporter.take(saved, marks.pressing, (marks.low, marks.high), stores)
        if report is not None:
            attach(report, outputs)

    def _free_request(self, request: "Request", *args: Any, **kwargs: Any) -> Any:
        state = self._table.states[request.request_id]
        of_client = state.replay_store is None
        if request.num_computed_tokens and of_client:
            self.eviction_counters.count_finished(state.evicted)
        # The last sampled token was never computed, so it is not in the cache.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if self._reporter is not None and tokens > 0 and of_client:
            progress = state.progress if state.holds_blocks else {}
            self._reporter.kept(kept_share(progress, self._layers, tokens))
        handed = self._stores.request_finished(state)
        store = state.base_store
        params, other = super()._free_request(request, *args, **kwargs)
        if store is not None:
            self._stores.renew(store)
        return (dict(TAKEN_OVER) if handed else params), other

    def _free_request_blocks(self, request: "Request") -> None:
        if self._remote is not None:
            self._remote.loads.leaves(request.request_id)
        super()._free_request_blocks(request)

    def _free_blocks(self, request: "Request") -> None:
        super()._free_blocks(request)
        self._core.remove(request.request_id)

    def _get_local_prefix_cache_hit(
        self, request: "Request", *args: Any, **kwargs: Any
    ) -> tuple["KVCacheBlocks", int, int, bool]:
        look_up = super()._get_local_prefix_cache_hit
        hit = self._prefix.look_up(request, lambda asked: look_up(asked, *args, **kwargs))
        if (state := self._table.states.get(request.request_id)) is not None:
            for part in self._parts:
                part.looked_up(state)
            # How many steps a load from another server takes is not known.
            loads = takes_over(request.kv_transfer_params)
            self._memory.consider(None if loads else state, hit[1], hit[0].blocks)
        return hit

    def _handle_blocked_waiting_request(self, request: "Request") -> bool:
        """Return whether a waiting request may be scheduled in this step.

        A request whose load failed holds no blocks, but vLLM keeps it among those that hold some
        and examines it before them. If it then finds no room, they would never run. Skipped for
        one step, it moves to the other waiting requests.
        """
        loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        ready = super()._handle_blocked_waiting_request(request)
        state = self._table.states[request.request_id]
        if ready and state.holds_blocks:
            # vLLM has loaded blocks for this request. It continues with them, without another
            # look-up.
            self._core.consider(state)
            self._memory.consider(None)
            return True
        if not ready or (loading and not self._holds_kv_blocks(request)):
            return False
        self._stores.read_key_again(state)
        waits = self._stores.waits(state)
        if waits and state.store_key is not None:
            # A request that another server computed also waits for a file that is late.
            claims = takes_over(request.kv_transfer_params)
            self._waiting_queue.examined(request, state.store_key, claims)
        return not waits

    def _mark_prefix_replay(
        self, request: "Request", num_hit_tokens: int, window_loaded: bool
    ) -> int:
        """Return the number of tokens at the end of a hit or of a load that are computed again."""
        replayed = super()._mark_prefix_replay(request, num_hit_tokens, window_loaded)
        if self._remote is None:
            return replayed
        return max(replayed, self._remote.replayed(request, num_hit_tokens))

    def _update_waiting_for_remote_kv(self, request: "Request") -> None:
        if self._remote is not None:
            self._remote.rewind(request)
        super()._update_waiting_for_remote_kv(request)
        if not request.num_computed_tokens:
            # The load failed, and its blocks are free. vLLM would count them again when another
            # connector loads the request, which might then wait for ever.
            self._inflight_prefills.discard(request)

    def _build_kv_connector_meta(
        self, connector: "KVConnectorBase_V1", scheduler_output: SchedulerOutput
    ) -> "KVConnectorMetadata":
        if self._remote is not None and self._remote.saves:
            scheduler_output = self._remote.visible(scheduler_output)
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        """Return the requests that end because the load of a block failed.

        With several groups, connectors also report the requests in ``failed_recving``, and vLLM
        would end the engine core because block ids do not name a group. The ids of vLLM's pool are
        unique, so they suffice for connectors that report blocks only, those that save prompts.
        vLLM finds blocks in the tables of running requests, where an eviction in flight may have
        replaced them.
        """
        remote = self._remote
        if remote is None or len(self.kv_cache_config.kv_cache_groups) == 1:
            failed = super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
        else:
            failed = set()
        if remote is None or not remote.saves:
            return failed
        depending = remote.lost(invalid_block_ids)
        if more := depending - failed:
            logger.error(
                "KV eviction: the load of a block failed, and requests that computed over it have "
                "evicted or left since; they end with an error: %s",
                more,
            )
        return failed | depending

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        for part in self._parts:
            part.before_reset(reset_running_requests)
        done = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if done:
            self._stores.reset()
        return done

    def finish_requests(self, request_ids: Any, finished_status: Any) -> "list[Request]":
        finished = super().finish_requests(request_ids, finished_status)
        self._totals.tick(idle=not self.requests)
        return finished

    def shutdown(self) -> None:
        self._totals.close()
        super().shutdown()


class EvictingAsyncScheduler(EvictingScheduler, AsyncScheduler):
    """vLLM's async scheduler with eviction."""


def build_stores(core: EvictionCore, config: EvictionConfig) -> PublishedStores:
    """Return the stores that requests share, in the KV cache or also outside it.

    Args:
        core: The engine core.
        config: The server's settings.

    Raises:
        ValueError: The flags ask for stores outside the KV cache, but this server shares no stores.

    """
    scheduler, vllm_config = core.scheduler, core.scheduler.vllm_config
    may_share = not (scheduler.num_lookahead_tokens or scheduler.prefix_replay_tokens)
    groups = dict(enumerate(scheduler.kv_cache_config.kv_cache_groups))
    stores = PublishedStores(core, may_share)
    if config.every and not (stores.enabled and vllm_config.speculative_config is None):
        raise ValueError(
            "KV eviction: --kv-eviction-every makes stores that requests share, but this server "
            "shares none: sharing them needs prefix caching, layers that all evict or attend "
            "within a window, and no speculative decoding."
        )
    if not config.has_tiers:
        return stores
    if not stores.enabled:
        raise ValueError(
            "KV eviction: --kv-eviction-store-memory and --kv-eviction-store-path keep stores "
            "that requests share, but this server shares none: sharing needs prefix caching, "
            "layers that all evict or attend within a window, and no draft model."
        )
    floats = floats_per_token(config)
    sizes = StoreSizes(
        {group_id: group.kv_cache_spec for group_id, group in groups.items()},
        {group_id: len(group.layer_names) for group_id, group in groups.items()},
        floats,
        pinned=vllm_config.device_config.device_type == "cuda",
        token_format=config.token_format,
        windows={
            group_id: manager.get_num_skipped_tokens
            for group_id, manager in stores.windows.managers.items()
        },
    )
    files = store_files(vllm_config, scheduler.kv_cache_config, config, floats)
    if files is not None:
        files.announce_limit()
    ranks = vllm_config.parallel_config.world_size
    return TieredStores(core, sizes, ranks, parse_size(config.store_memory), files)


def build_parts(core: EvictionCore, config: EvictionConfig, stores: PublishedStores) -> list[Part]:
    """Return the optional parts that this server's flags ask for, in the order of their calls.

    Args:
        core: The engine.
        config: The server's settings.
        stores: The stores that requests share.

    Raises:
        ValueError: This server does not support a part; the message is one sentence.

    """
    parts: list[Part] = []
    names = connector_names(core.scheduler.vllm_config.kv_transfer_config)
    connectors = connectors_of(core.scheduler.connector)
    for name, connector in zip(names, connectors, strict=True):
        if isinstance(connector, OffloadingConnector):
            parts.append(OffloadGuard(core, connector))
        else:
            parts.append(RemotePrefill(core, stores, connector, name))
    if config.audits:
        parts.append(Replays(core, config, stores))
    return parts

"""Eviction on a worker: follows the scheduler's plan and moves the surviving tokens."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvevict.attention.extensions.base import make_extensions
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.config.names import keeps_by_layer
from vllm_kvevict.ops.pieces import joined
from vllm_kvevict.ops.torch.pages import compact_index
from vllm_kvevict.ops.torch.select import select_tokens
from vllm_kvevict.policies.base import Policy, Scorer, protect
from vllm_kvevict.rules.rule import blocks_for
from vllm_kvevict.rules.step_plan import PLAN, Eviction, GroupEviction, StepPlan
from vllm_kvevict.worker.candidates import CandidateReader, Holdings, Inputs
from vllm_kvevict.worker.comparison import Comparison
from vllm_kvevict.worker.fused import FusedEvictions
from vllm_kvevict.worker.load_fence import LoadFence
from vllm_kvevict.worker.meter import EvictionMeter
from vllm_kvevict.worker.probes import Probes
from vllm_kvevict.worker.prompts import PromptDigests
from vllm_kvevict.worker.record import EvictionRecord as EvictionRecord
from vllm_kvevict.worker.runners import RunnerRows
from vllm_kvevict.worker.settle import settle
from vllm_kvevict.worker.shared_stores import SharedStores
from vllm_kvevict.worker.workspace import Workspace

logger = init_logger("vllm.kv_eviction.worker")


def replaceable(scorer: Scorer) -> bool:
    """Return True if an eviction keeps the most recent tokens when this scorer fails.

    Only scorers of other packages are replaced; an error in one of this package ends the engine.
    The scheduler frees the blocks that the eviction replaces, so the store must be filled. The
    number of its blocks depends on lengths alone: all ranks agree on it even if one of them fails.
    """
    foreign = type(scorer).__module__.partition(".")[0] != __name__.partition(".")[0]
    # The other ranks would wait inside the collective for a rank that failed before it.
    alone = not scorer.requirements.crosses_ranks or get_tensor_model_parallel_world_size() == 1
    return foreign and alone and not scorer.requirements.weighs


@dataclass(frozen=True)
class Survivors:
    """The tokens that an eviction keeps in the L layers of a group: K = S * H * page_tokens each.

    Args:
        scores: [L, H, N] float32 of the candidates, protected ones included.
        pages: [L, H] int64 pages of each head.
        columns: [L, K] int64 kept candidates, heads concatenated.
        source_page: [L, K] int64 pages that they come from.
        source_slot: [L, K] int64 slots in these pages.
        target_page: [S * H] int64 pages that they fill in order.

    """

    scores: torch.Tensor
    pages: torch.Tensor
    columns: torch.Tensor
    source_page: torch.Tensor
    source_slot: torch.Tensor
    target_page: torch.Tensor


class WorkerEviction:
    """Runs the plan of each step, between forward passes.

    Args:
        policies: Scorer and allocator of every policy that an eviction may name.
        states: Device state of every group that evicts, by group id.
        caches: The caches of evictable layers by name.
        rings: Observation rings, or None if no policy needs them.
        token_stats: Floats of the cached tokens, or None if no policy needs them.
        rows: Adapter of the model runner.
        fused: Runs the evictions of some policies with CUDA kernels instead of PyTorch operations,
            unless there are listeners.
        head_shares: [L, H] float64 measured shares of the heads of every group, by group id; None
            if no shares were measured. :meth:`_shares_of` selects the policies that follow them.
        probes: Probes that score the keys, or None if no policy requires key scores.
        workspace: Memory in which evictions run, or None for torch's own.

    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        states: dict[int, GroupState],
        caches: Mapping[str, LayerCache],
        rings: ObservationRings | None,
        token_stats: TokenStats | None,
        rows: RunnerRows,
        fused: FusedEvictions | None = None,
        head_shares: Mapping[int, torch.Tensor] | None = None,
        probes: Probes | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.policies = policies
        self.states = states
        self.rings = rings
        self.token_stats = token_stats
        self.listeners: list[Callable[[EvictionRecord], None]] = []
        self.evictions = 0
        self.meter = EvictionMeter(next(iter(caches.values())).pages.device)
        self._failed: set[str] = set()
        self._caches = caches
        named = [policy.requirements.attention for policy in policies.values()]
        self.extensions = make_extensions(named, caches, token_stats)
        self._rows = rows
        self._fused = fused
        self._probes = probes
        self._head_shares = head_shares
        self._workspace = workspace
        self.stores = SharedStores(states, lambda request: int(self._rows.rows([request])[0]))
        self.fence: LoadFence | None = None
        """None unless a connector posts transfers past the stream."""
        self.comparison: Comparison | None = None
        """None unless evictions are audited."""
        self._plan: StepPlan | None = None
        self._due: Sequence[Eviction] = ()
        self._unsettled: set[int] = set()
        self._done = False
        self._batch: torch.Tensor | None = None
        random = any(policy.requirements.random for policy in policies.values())
        self._prompts = PromptDigests() if random else None
        self._reader = CandidateReader(caches, rings, token_stats, self._prompts, probes, rows)

    def warm_up(self) -> None:
        """Load the kernels of evictions, before there is a request."""
        with self._in_workspace():
            if self._fused is not None:
                self._fused.warm_up(self._shares_of)
            others = [p.scorer for name, p in self.policies.items() if not self._takes_fused(name)]
            if others:
                cache = next(iter(self._caches.values()))
                keys = cache.key_sequences(torch.zeros_like(cache.pages[:1, :1], dtype=torch.int64))
                for scorer in others:
                    scorer.warm_up(keys)

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Follow the scheduler before the forward pass."""
        # A rank that does not sample still has the last step's evictions to run.
        self.evict()
        cleared = self._rows.begin_step(scheduler_output)
        for state in self.states.values():
            state.clear(cleared)
        for policy in self.policies.values():
            policy.scorer.clear_rows(cleared)
        if self._prompts is not None:
            self._prompts.begin_step(scheduler_output)
        plan: StepPlan = getattr(scheduler_output, PLAN, None) or StepPlan()
        self._plan = plan.for_groups(self.states)
        if plan.settle_first:
            settle(plan.settle_first, scheduler_output)
        self.stores.begin_step(self._plan)
        if self.comparison is not None:
            self.comparison.begin_step(scheduler_output, self._plan)
        self._batch = None

    def end_step(self, scheduler_output: SchedulerOutput, run: bool = True) -> None:
        """Make the evictions due after the forward pass, unless it failed (``run`` is False)."""
        if run and self.comparison is not None:
            self.comparison.keep_hidden_states(scheduler_output)
        if run and self._plan is not None:
            # The plan is kept until evictions run, because a drafter reads it as well.
            plan = self._plan
            self._due, self._unsettled, self._done = plan.evictions, plan.settle, True
        else:
            self._plan = self._batch = None

    def evict(self) -> None:
        """Run the evictions that are due."""
        due, done, self._due, self._done = self._due, self._done, (), False
        self._plan = self._batch = None
        unsettled, self._unsettled = self._unsettled, set()
        if unsettled:
            settle(unsettled)
        if due:
            with self._in_workspace():
                self._evict_all(due)
            if self.fence is not None:
                self.fence.record()
        if done:
            self.stores.end_step(due)
            if self.comparison is not None:
                self.comparison.end_step()

    def _in_workspace(self) -> AbstractContextManager[None]:
        return nullcontext() if self._workspace is None else self._workspace.use()

    def _evict_all(self, due: Sequence[Eviction]) -> None:
        fused: dict[str, list[Eviction]] = {}
        for eviction in due:
            if self._takes_fused(eviction.policy):
                fused.setdefault(eviction.policy, []).append(eviction)
                continue
            # The PyTorch operations read sizes from the device.
            with self.meter.evictions(1), gpu_sync_allowed():
                self._evict(eviction)
        for policy, evictions in fused.items():
            self._evict_fused(policy, evictions)

    def _takes_fused(self, policy: str) -> bool:
        """Return True if the CUDA kernels run evictions under a policy."""
        return self._fused is not None and not self.listeners and self._fused.takes(policy)

    def _shares_of(self, policy: str) -> Mapping[int, torch.Tensor] | None:
        """Return the measured shares of the heads if a policy follows them, else None."""
        allocator, needs = self.policies[policy].allocator, self.policies[policy].requirements
        # Policies that cross ranks need every head of the layer to keep the same tokens.
        follows = allocator.follows_shares and not needs.crosses_ranks
        return self._head_shares if follows and keeps_by_layer(policy, measured=True) else None

    def batch_rows(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Return the rows [R] int64 of the current batch; None outside a scheduled step."""
        if self._plan is None:
            return None
        if self._batch is None:
            self.stores.enter()
            self._batch = torch.from_numpy(self._rows.batch_rows(common))
        return self._batch

    def batch_rings(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Return the ring slots [R] int64 of the batch, -1 for none; None if all have none."""
        if self._plan is None or not self._plan.rings or self.rings is None:
            return None
        batch = self.batch_rows(common)
        assert batch is not None
        rows = torch.from_numpy(self._rows.rows(self._plan.rings))
        num_rows = int(max(batch.max(), rows.max())) + 1
        slots = torch.full((num_rows,), -1, dtype=torch.int64, device="cpu")
        slots[rows] = torch.tensor(list(self._plan.rings.values()), device="cpu")
        return slots[batch]

    def batch_accumulating(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Return the batch indices [K] int64 of requests with accumulated attention, or None."""
        if self._plan is None or not self._plan.accumulating:
            return None
        batch = self.batch_rows(common)
        assert batch is not None
        rows = torch.from_numpy(self._rows.rows(self._plan.accumulating))
        return torch.isin(batch, rows).nonzero().flatten()

    def cache(self, layer_name: str) -> LayerCache:
        """Return the cache of an evictable layer."""
        return self._caches[layer_name]

    def _evict_fused(self, policy: str, evictions: Sequence[Eviction]) -> None:
        assert self._fused is not None
        rows = self._rows.rows([eviction.request_id for eviction in evictions])
        with self.meter.evictions(len(evictions)):
            for pages in self._fused.run(policy, evictions, rows, self._shares_of(policy)):
                self.meter.pages(pages)
        self.evictions += len(evictions)

    def _evict(self, eviction: Eviction) -> None:
        row = int(self._rows.rows([eviction.request_id])[0])
        for group in eviction.groups:
            self._evict_group(eviction, group, row)
        self._reader.free_buffers()
        self.evictions += 1

    def _evict_group(self, eviction: Eviction, group: GroupEviction, row: int) -> None:
        """Read the candidates, score them, allocate pages to heads and move the survivors."""
        policy, state = self.policies[eviction.policy], self.states[group.group_id]
        whole = self._reader.holdings(eviction, group, state, row)
        failed, pages, parts = False, [], []
        for holdings in whole.parts():
            inputs = self._reader.inputs(policy.requirements, holdings)
            try:
                survivors = self._allocate(policy, holdings, self._score(policy, holdings, inputs))
            except Exception:
                if not replaceable(policy.scorer):
                    raise
                if not failed:
                    self._note_failure(eviction.policy)
                failed = True
                recency = torch.where(holdings.valid, holdings.columns.float(), -torch.inf)
                survivors = self._allocate(policy, holdings, recency)
            log_weights = self._move(policy, holdings, survivors, inputs.made)
            pages.append(survivors.pages)
            if self.listeners:
                # The tokens of all layers are large, and an eviction runs in a workspace.
                parts.append((survivors, log_weights))
            del survivors, log_weights
        self.stores.chosen(group, failed)
        if failed and group.published:
            self.meter.unscored.append((eviction.request_id, group.store[0]))
        self._record(policy, whole, joined(pages), parts)

    def _score(self, policy: Policy, holdings: Holdings, inputs: Inputs) -> torch.Tensor:
        """Return the scores [L, H, N] float32 of the candidates.

        Raises:
            ValueError: A scorer returns scores of another shape.

        """
        needs, blocks, columns = policy.requirements, [], len(holdings.columns)
        for heads in self._reader.blocks(needs, holdings):
            # Without a name, so that the keys of a block are freed before the next are read.
            scores = policy.scorer.scores(self._reader.candidates(needs, holdings, heads, inputs))
            want, got = (heads.stop - heads.start, columns), tuple(scores.shape)
            if got != want:
                raise ValueError(f"scores must be of shape {want}, not {got}")
            blocks.append(scores)
        return joined(blocks).unflatten(0, holdings.grid.shape[:2])

    def _allocate(self, policy: Policy, holdings: Holdings, scores: torch.Tensor) -> Survivors:
        """Share the store's pages between the heads, and select the best tokens of each head."""
        eviction, group, size = holdings.eviction, holdings.group, holdings.page_tokens
        scores = protect(scores, holdings.valid, eviction.protect_first)
        by_group = self._shares_of(eviction.policy)
        shares = None
        if by_group is not None:
            shares = by_group[group.group_id][holdings.first :][: len(scores)]
        # Measured shares divide the pages that remain after every head has its protected pages.
        first = 0 if shares is None else blocks_for(eviction.protect_first, size)
        blocks = len(group.store) - first
        pages = first + policy.allocator.pages(scores, holdings.caps - first, blocks, size, shares)
        columns = select_tokens(scores, pages, size, len(group.store))
        moves = compact_index(
            holdings.grid,
            columns,
            pages,
            holdings.store,
            holdings.block_size,
            size,
            holdings.store_pages,
        )
        return Survivors(scores, pages, columns, *moves)

    def _move(
        self,
        policy: Policy,
        holdings: Holdings,
        survivors: Survivors,
        made: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Copy the survivors and their floats to the new store.

        Returns:
            [L, S * H * page_tokens, 2] log-weights of the survivors; None unless the policy weighs.

        """
        names, needs, target_page = holdings.layer_names, policy.requirements, survivors.target_page
        for index, name in enumerate(names):
            source = survivors.source_page[index], survivors.source_slot[index]
            cache, from_store = self._caches[name], None
            if not cache.token_format.as_cached:
                from_store = survivors.columns[index] < holdings.stored_columns
            cache.move(*source, target_page, from_store)
            if needs.floats_per_token and made is None and not needs.weighs:
                assert self.token_stats is not None
                self.token_stats.move(name, *source, target_page)
        if made is not None:
            assert self.token_stats is not None
            self.token_stats.keep(names, made, survivors.columns, survivors.pages, target_page)
        return self._weigh(policy.scorer, holdings, survivors) if needs.weighs else None

    def _record(
        self,
        policy: Policy,
        holdings: Holdings,
        pages: torch.Tensor,
        parts: Sequence[tuple[Survivors, torch.Tensor | None]],
    ) -> None:
        """Record an eviction in the state, and report it.

        Args:
            policy: The policy.
            holdings: The pages of all layers of the group.
            pages: [L, H] pages that each head keeps.
            parts: Survivors and log-weights of some layers each, in order, for listeners.

        """
        weighted, group = policy.requirements.weighs, holdings.group
        holdings.state.record(holdings.row, group.tail_start, holdings.store, pages, weighted)
        self.meter.pages(pages)
        if not self.listeners:
            return
        record = EvictionRecord(
            holdings.eviction,
            group,
            joined([survivors.columns for survivors, _ in parts]),
            pages,
            holdings.padding * holdings.page_tokens,
            joined([survivors.scores for survivors, _ in parts]),
            joined([weights for _, weights in parts if weights is not None]) if weighted else None,
        )
        for listener in self.listeners:
            listener(record)

    def _weigh(self, scorer: Scorer, holdings: Holdings, survivors: Survivors) -> torch.Tensor:
        """Write and return the log-weights of the kept tokens, [L, S * H * page_tokens, 2]."""
        assert self.token_stats is not None
        state, layers = holdings.state, []
        for name, columns in zip(holdings.layer_names, survivors.columns, strict=True):
            by_head = columns.unflatten(0, (state.num_heads, -1))
            weights = scorer.kept(holdings.row, name, by_head).flatten(0, 1)
            self.token_stats.write(name, weights, survivors.target_page)
            layers.append(weights)
        return torch.stack(layers)

    def _note_failure(self, policy: str) -> None:
        """Count the failure that is being handled, and log it if it is the policy's first."""
        self.meter.failed()
        if policy not in self._failed:
            self._failed.add(policy)
            logger.exception(
                "KV eviction: policy %s failed. Whenever it fails, the eviction keeps the most "
                "recent tokens. This is logged once.",
                policy,
            )

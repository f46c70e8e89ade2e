"""The worker's side of eviction: follows the scheduler's plan and moves the survivors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.memories import Memories
from vllm_kvevict.cache.page_values import PageValues
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.ops.reference.pages import candidate_grid, compact_index
from vllm_kvevict.ops.reference.select import select_tokens
from vllm_kvevict.ops.reference.value_shares import value_shares
from vllm_kvevict.policies.base import Policy, Scorer, Summary, WeightedScorer, protect
from vllm_kvevict.schedule.step_plan import PLAN, Eviction, GroupEviction, StepPlan
from vllm_kvevict.schedule.timeline import blocks_for
from vllm_kvevict.settings.names import keeps_by_layer
from vllm_kvevict.worker.candidates import CandidateReader
from vllm_kvevict.worker.comparison import Comparison
from vllm_kvevict.worker.fused import FusedEvictions
from vllm_kvevict.worker.meter import EvictionMeter
from vllm_kvevict.worker.probes import Probes
from vllm_kvevict.worker.prompts import PromptDigests
from vllm_kvevict.worker.ranks import sum_of_ranks
from vllm_kvevict.worker.record import EvictionRecord as EvictionRecord
from vllm_kvevict.worker.runners import RunnerRows
from vllm_kvevict.worker.settle import settle
from vllm_kvevict.worker.shared_stores import SharedStores

logger = init_logger("vllm.kv_eviction.worker")


def replaceable(scorer: Scorer) -> bool:
    """Return True if an eviction keeps the most recent tokens when this scorer fails.

    Only scorers of other packages are replaced; an error in one of this package ends the engine.
    The scheduler frees the blocks that the eviction replaces, so the store must be filled. The
    number of its blocks depends on lengths alone: all ranks agree on it even if one of them fails.
    """
    foreign = type(scorer).__module__.partition(".")[0] != __name__.partition(".")[0]
    # The other ranks would wait inside the collective for a rank that failed before it.
    alone = not scorer.crosses_ranks or get_tensor_model_parallel_world_size() == 1
    return foreign and alone and not isinstance(scorer, WeightedScorer)


class WorkerEviction:
    """Runs the plan of each step, between forward passes.

    Args:
        policies: Scorer and allocator of every policy that an eviction may name.
        states: Device state of every group that evicts, by group id.
        caches: The caches of evictable layers by name.
        rings: Observation rings, or None where no policy needs them.
        page_values: Numbers beside the cached tokens, or None where no policy needs them.
        rows: Adapter of the model runner.
        fused: What runs the evictions of some policies in the place of the PyTorch operations;
            not while somebody listens.
        head_shares: [L, H] float64 measured shares of the heads of every group, by group id; None
            where heads have none. Policies follow them whose scores compare and whose heads do
            not share a layer's budget by score.
        probes: Score the keys for policies with ``needs_key_scores``; None where there is none.

    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        states: dict[int, GroupState],
        caches: Mapping[str, LayerCache],
        rings: ObservationRings | None,
        page_values: PageValues | None,
        rows: RunnerRows,
        fused: FusedEvictions | None = None,
        head_shares: Mapping[int, torch.Tensor] | None = None,
        probes: Probes | None = None,
    ) -> None:
        self.policies = policies
        self.states = states
        self.rings = rings
        self.page_values = page_values
        self.listeners: list[Callable[[EvictionRecord], None]] = []
        self.evictions = 0
        self.meter = EvictionMeter(next(iter(caches.values())).pages.device)
        self.memories = Memories()
        self._failed: set[str] = set()
        self._caches = caches
        self._rows = rows
        self._fused = fused
        self._head_shares = head_shares
        self._probes = probes
        self.stores = SharedStores(states, lambda one: int(self._rows.rows([one])[0]))
        self.comparison: Comparison | None = None
        """Where evictions are audited."""
        self._plan: StepPlan | None = None
        self._due: Sequence[Eviction] = ()
        self._unsettled: set[int] = set()
        self._done = False
        self._batch: torch.Tensor | None = None
        random = any(policy.scorer.random for policy in policies.values())
        self._prompts = PromptDigests() if random else None
        self._reader = CandidateReader(policies, caches, rings, page_values, self._prompts)

    def warm_up(self) -> None:
        """Load what evictions run, before there is a request."""
        if self._fused is not None:
            self._fused.warm_up(self._shares_of)

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Follow the scheduler before the forward pass."""
        # A rank that was not asked to sample.
        self.evict()
        cleared = self._rows.begin_step(scheduler_output)
        for state in self.states.values():
            state.clear(cleared)
        self.memories.clear(cleared)
        if self._prompts is not None:
            self._prompts.begin_step(scheduler_output)
        plan: StepPlan = getattr(scheduler_output, PLAN, None) or StepPlan()
        self._plan = plan.of(self.states)
        if plan.settle_first:
            settle(plan.settle_first, scheduler_output)
        self.stores.begin_step(self._plan)
        if self.comparison is not None:
            self.comparison.begin_step(scheduler_output, self._plan)
        self._batch = None

    def end_step(self, scheduler_output: SchedulerOutput, run: bool = True) -> None:
        """The forward pass is over: its evictions are due, if it was run to its end."""
        if run and self.comparison is not None:
            self.comparison.hear(scheduler_output)
        if run and self._plan is not None:
            # A drafter reads the plan too, until evictions run.
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
        fused: dict[str, list[Eviction]] = {}
        for eviction in due:
            if self._takes_fused(eviction.policy):
                fused.setdefault(eviction.policy, []).append(eviction)
                continue
            # The PyTorch operations ask the device for sizes.
            with self.meter.evictions(1), gpu_sync_allowed():
                self._evict(eviction)
        for policy, evictions in fused.items():
            self._evict_fused(policy, evictions)
        if done:
            self.stores.end_step(due)
            if self.comparison is not None:
                self.comparison.end_step()

    def _takes_fused(self, policy: str) -> bool:
        """Whether the kernels run evictions under a policy."""
        return self._fused is not None and not self.listeners and self._fused.takes(policy)

    def _shares_of(self, policy: str) -> Mapping[int, torch.Tensor] | None:
        """Measured shares of the heads, where a policy follows them."""
        one = self.policies[policy]
        # What crosses ranks needs every head of the layer to keep the same tokens.
        follows = one.allocator.follows_shares and not one.scorer.crosses_ranks
        return self._head_shares if follows and keeps_by_layer(policy, measured=True) else None

    def batch_rows(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """[R] int64 rows of the batch under way; None outside a scheduled step."""
        if self._plan is None:
            return None
        if self._batch is None:
            self.stores.enter()
            self._batch = torch.from_numpy(self._rows.batch_rows(common))
        return self._batch

    def batch_rings(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """[R] int64 ring slot of each request of the batch, -1 for none; None if all have none."""
        if self._plan is None or not self._plan.rings or self.rings is None:
            return None
        batch = self.batch_rows(common)
        assert batch is not None
        rows = torch.from_numpy(self._rows.rows(self._plan.rings))
        most = int(max(batch.max(), rows.max())) + 1
        slots = torch.full((most,), -1, dtype=torch.int64, device="cpu")
        slots[rows] = torch.tensor(list(self._plan.rings.values()), device="cpu")
        return slots[batch]

    def batch_accumulating(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """[K] int64 places in the batch of requests whose attention is added up, or None."""
        if self._plan is None or not self._plan.accumulating:
            return None
        batch = self.batch_rows(common)
        assert batch is not None
        mine = torch.from_numpy(self._rows.rows(self._plan.accumulating))
        return torch.isin(batch, mine).nonzero().flatten()

    def cache(self, layer_name: str) -> LayerCache:
        """The cache of an evictable layer."""
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
        self.evictions += 1

    def _evict_group(self, eviction: Eviction, group: GroupEviction, row: int) -> None:
        state = self.states[group.group_id]
        bs = state.timeline.block_size
        # Pinned and asynchronous: a plain copy would wait for the forward pass.
        upload = partial(async_tensor_h2d, device=state.head_indptr.device, dtype=torch.int64)
        grid, padding = candidate_grid(
            state.indptr(row), upload(group.old_store), upload(group.positional)
        )
        store = upload(group.store)
        tail_blocks = (group.tail_start - group.old_tail_start) // bs
        candidate_pages = grid.shape[-1] - len(group.positional) + tail_blocks
        scorer = self.policies[eviction.policy].scorer
        # What is made of a token once, and kept beside it: [H, N, C] of each layer.
        made: Sequence[torch.Tensor] = ()
        if scorer.needs_value_shares:
            made = self._value_shares(state, grid, group)[..., None].unbind()
        elif scorer.needs_key_scores:
            made = self._key_scores(state, grid[..., :candidate_pages], eviction, group)
        probes = self._probes.at(eviction) if self._probes is not None else {}
        summaries: list[Summary] = []
        real = padding * bs
        places = torch.arange(candidate_pages * bs, device=grid.device)
        valid = places >= real[..., None]

        def scored() -> torch.Tensor:
            found = []
            for index, name in enumerate(state.layer_names):
                where = grid[index], padding[index], candidate_pages
                candidates = self._reader.candidates(state, name, *where, eviction, group)
                if scorer.needs_value_shares:
                    mine = made[index][:, : candidates.valid.shape[1], 0]
                    candidates = replace(candidates, value_shares=mine)
                elif scorer.needs_key_scores:
                    candidates = replace(
                        candidates, key_scores=made[index], window_weights=probes[name].window
                    )
                if isinstance(scorer, WeightedScorer):
                    summaries.append(scorer.summarize(candidates, self.memories.of(row, name)))
                    raw = summaries[-1].scores
                else:
                    raw = scorer.scores(candidates)
                    if raw.shape != valid.shape[1:]:
                        want, got = tuple(valid.shape[1:]), tuple(raw.shape)
                        raise ValueError(f"scores must be of shape {want}, not {got}")
                found.append(raw)
            return torch.stack(found)

        def choose(found: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = protect(found, valid, eviction.protect_first)
            shares = self._shares_of(eviction.policy)
            of_heads = None if shares is None else shares[group.group_id]
            allocator, caps = self.policies[eviction.policy].allocator, candidate_pages - padding
            # Measured shares divide what is left when every head has its protected pages.
            first = 0 if of_heads is None else blocks_for(eviction.protect_first, bs)
            blocks = len(group.store) - first
            pages = first + allocator.pages(scores, caps - first, blocks, bs, of_heads)
            columns = select_tokens(scores, pages, bs)
            return scores, pages, columns, *compact_index(grid, columns, pages, store, bs)

        try:
            chosen = choose(scored())
        except Exception:
            if not replaceable(scorer):
                raise
            self._note_failure(eviction.policy)
            chosen = choose(torch.where(valid, places.float(), -torch.inf))
        scores, pages, columns, source_page, source_slot, target_page = chosen
        for index, name in enumerate(state.layer_names):
            cache = self._caches[name]
            source = source_page[index], source_slot[index]
            cache.layout.copy(cache.pages, *source, target_page)
            if scorer.page_channels and not made:
                assert self.page_values is not None
                self.page_values.move(name, *source, target_page)
        if made:
            assert self.page_values is not None
            self.page_values.keep(state.layer_names, made, columns, pages, target_page)
        log_weights = None
        if isinstance(scorer, WeightedScorer):
            log_weights = self._weigh(scorer, summaries, columns, state, row, target_page)
        state.record(row, group.tail_start, store, pages, weighted=log_weights is not None)
        self.meter.pages(pages)
        told = columns, pages, real, scores, log_weights
        for listener in self.listeners:
            listener(EvictionRecord(eviction, group, *told))

    def _note_failure(self, policy: str) -> None:
        """Count the failure that is being handled, and log it if it is the policy's first."""
        self.meter.failed()
        if policy not in self._failed:
            self._failed.add(policy)
            logger.exception(
                "KV eviction: policy %s failed; its evictions keep the most recent tokens "
                "whenever it fails, and this is logged once",
                policy,
            )

    def _value_shares(
        self, state: GroupState, grid: torch.Tensor, group: GroupEviction
    ) -> torch.Tensor:
        """Share of each head in the value norms of the grid's tokens [L, H, P * block_size].

        Of a token of the store it is what :meth:`PageValues.keep` wrote; all heads hold the others.
        """
        assert self.page_values is not None
        stored, norms = [], []
        store_pages = grid.shape[-1] - len(group.positional)
        for name, pages in zip(state.layer_names, grid, strict=True):
            stored.append(self.page_values.layer(name)[pages[:, :store_pages], :, 0])
            norms.append(self._caches[name].value_norms(pages[:, store_pages:]))
        found = value_shares(torch.stack(norms), sum_of_ranks)
        return torch.cat([torch.stack(stored).flatten(2), found], dim=-1)

    def _key_scores(
        self, state: GroupState, grid: torch.Tensor, eviction: Eviction, group: GroupEviction
    ) -> list[torch.Tensor]:
        """What the probes say of every candidate of each layer [H, P * block_size, C]."""
        assert self._probes is not None
        new = group.tail_start - group.old_tail_start
        positions = self._rows.positions(
            eviction.request_id, group.old_tail_start, group.tail_start
        )
        on_device = async_tensor_h2d(positions, device=grid.device)
        end = eviction.num_tokens
        first, last = end - group.old_tail_start, end - group.tail_start
        ages = torch.arange(first, last, -1, device=grid.device)
        stored = grid.shape[-1] - new // state.timeline.block_size
        return self._probes.scores(state, grid, stored, on_device, ages, eviction)

    def _weigh(
        self,
        scorer: WeightedScorer,
        summaries: Sequence[Summary],
        columns: torch.Tensor,
        state: GroupState,
        row: int,
        target_page: torch.Tensor,
    ) -> torch.Tensor:
        """Write the log-weights [L, S * H * block_size, 2] of what was kept, and remember."""
        assert self.page_values is not None
        kept = columns.unflatten(1, (state.num_heads, -1))
        layers = []
        for index, name in enumerate(state.layer_names):
            summary, mine = summaries[index], kept[index]
            weights = summary.log_weights.gather(1, mine[..., None].expand(-1, -1, 2))
            pages = self.page_values.layer(name)
            pages[target_page, :, :2] = weights.view(-1, state.timeline.block_size, 2)
            self.memories.keep(row, name, scorer.moved(summary.memory, mine))
            layers.append(weights.flatten(0, 1))
        return torch.stack(layers)

"""The due evictions of a step, run in a few launches of the CUDA operations.

The host never waits for the device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.ops.cuda.allocate import batch_pages, batch_shared_pages
from vllm_kvevict.ops.cuda.batch import Due, EvictionBatch
from vllm_kvevict.ops.cuda.defensive import NEIGHBOURS, defensive_scores
from vllm_kvevict.ops.cuda.limits import (
    BLOCK_SIZES,
    DTYPES,
    HEAD_SIZES,
    MAX_LAYERS,
)
from vllm_kvevict.ops.cuda.pages import compact
from vllm_kvevict.ops.cuda.probe import probe_scores
from vllm_kvevict.ops.cuda.rows import candidate_rows
from vllm_kvevict.ops.cuda.score import WindowLayers, window_scores
from vllm_kvevict.ops.cuda.select import batch_columns
from vllm_kvevict.ops.cuda.token_stats import keep_page_values
from vllm_kvevict.ops.fp8 import FP8
from vllm_kvevict.ops.token_format import PackedFormat, TokenFormat
from vllm_kvevict.ops.torch.defensive import AFTER, BEFORE
from vllm_kvevict.policies.allocators import Adaptive
from vllm_kvevict.policies.base import Policy
from vllm_kvevict.policies.defensive import Defensive
from vllm_kvevict.policies.kernels import has_kernels
from vllm_kvevict.policies.probe import Probe
from vllm_kvevict.policies.snapkv import SnapKV
from vllm_kvevict.rules.rule import blocks_for
from vllm_kvevict.rules.step_plan import Eviction, GroupEviction
from vllm_kvevict.worker.fused_probes import GroupProbes, group_networks
from vllm_kvevict.worker.probes import Probes
from vllm_kvevict.worker.ranks import sum_of_ranks
from vllm_kvevict.worker.workspace import EvictionSizes

if TYPE_CHECKING:
    from vllm_kvevict.cache.layer_cache import LayerCache


HeadShares = Mapping[int, torch.Tensor]
"""[L, H] float64 shares of the heads of every group, by group id."""


@dataclass(frozen=True)
class _Group:
    state: GroupState
    caches: list[torch.Tensor]
    rings: list[torch.Tensor]
    scales: list[float]
    softcap: float
    kept: list[torch.Tensor]
    probes: dict[float, GroupProbes]
    """Probes by the weight of the prose features."""
    sizes: EvictionSizes
    token_format: TokenFormat
    stored_scales: list[tuple[float, float]]
    """Scales of the keys and the values of FP8 caches, else 1."""
    centres: torch.Tensor | None
    """[L, H, D] of stores in few bits."""
    first: int = 0
    """Index of the first layer in the group."""

    def part(self, start: int, stop: int) -> "_Group":
        """Return some of the layers."""
        layers = slice(start, stop)
        return replace(
            self,
            caches=self.caches[layers],
            rings=self.rings[layers],
            scales=self.scales[layers],
            stored_scales=self.stored_scales[layers],
            centres=None if self.centres is None else self.centres[layers],
            kept=self.kept[layers],
            probes={weight: probes.part(layers) for weight, probes in self.probes.items()},
            first=self.first + start,
        )

    @property
    def head_indptr(self) -> torch.Tensor:
        """[L, rows, H + 1] int32 head splits of these layers, a view."""
        return self.state.head_indptr[self.first : self.first + len(self.caches)]


class FusedEvictions:
    """Evictions of policies that score by the window's attention, or by probes of the keys.

    Scores, allocation, selection and compaction take one launch each for all layers of a group
    and for as many due requests as fit its workspace.

    Args:
        policies: Scorer and allocator of every policy that an eviction may name.
        states: Device state of every group that evicts, by group id.
        caches: The caches of evictable layers by name.
        rings: Observation rings, or None if no policy reads queries.
        token_stats: Floats of the cached tokens, or None if no policy needs them.
        longest: Longest sequence in tokens. Requests share a launch as long as their number times
            the longest of them does not exceed it.
        probes: The model's probes, or None if no policy reads them.
        workspace: Bytes of the workspace. Launches that need more run some layers at a time. None
            if memory does not limit launches.

    Raises:
        ValueError: The kernels cannot serve these layers; the message is that of
            :func:`obstacle`.

    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        states: Mapping[int, GroupState],
        caches: "Mapping[str, LayerCache]",
        rings: ObservationRings | None,
        token_stats: TokenStats | None,
        longest: int,
        probes: Probes | None = None,
        workspace: int | None = None,
    ) -> None:
        problem = obstacle(states, caches, rings)
        if problem is not None:
            raise ValueError(problem)
        self._policies = policies
        self._probes = probes
        self._longest = longest
        self._workspace = workspace
        self._groups = {
            id_: _group(state, caches, rings, token_stats, probes, longest)
            for id_, state in states.items()
        }

    def takes(self, policy: str) -> bool:
        """Return True if the kernels compute a policy's scores."""
        scorer, groups = self._policies[policy].scorer, self._groups.values()
        if not has_kernels(scorer):
            return False
        if isinstance(scorer, Defensive | Probe):
            compiled = (scorer.kernel, scorer.before, scorer.after) == (NEIGHBOURS, BEFORE, AFTER)
            inputs = [group.probes if isinstance(scorer, Probe) else group.kept for group in groups]
            return compiled and all(inputs)
        return True

    def run(
        self,
        policy: str,
        evictions: Sequence[Eviction],
        rows: Iterable[int],
        shares: HeadShares | None = None,
    ) -> list[torch.Tensor]:
        """Run evictions of different requests under one policy.

        Args:
            policy: A policy for which :meth:`takes` returns True.
            evictions: The due evictions.
            rows: State row of each eviction's request.
            shares: Measured shares of the heads, if the policy follows them.

        Returns:
            [L, H] int32 pages that every head kept of one of the requests, for each group.

        """
        by_group: dict[tuple[int, bool, float], list[Due]] = {}
        for eviction, row in zip(evictions, rows, strict=True):
            prose = self._probes.weight(eviction) if self._probes is not None else 0.0
            for share in eviction.groups:
                key = share.group_id, eviction.ring is not None, prose
                by_group.setdefault(key, []).append(_due(eviction, share, int(row)))
        kept: dict[int, torch.Tensor] = {}
        for (group_id, recorded, prose), due in by_group.items():
            due.sort(key=lambda eviction: eviction.in_place)
            group_shares = None if shares is None else shares[group_id]
            group = self._groups[group_id]
            longest = self._longest
            if self._workspace is not None:
                longest = group.sizes.tokens_at_once(longest, self._workspace)
            for part in launches(due, longest):
                pages = self._launch(
                    self._policies[policy],
                    group,
                    part,
                    group_shares,
                    recorded,
                    prose,
                )
                kept.setdefault(group_id, pages[0])
        return list(kept.values())

    def warm_up(self, shares_of: Callable[[str], HeadShares | None]) -> None:
        """Load every kernel that serves a policy, with evictions that leave no state.

        CUDA loads a kernel at its first launch, which may wait for the device. Blocks 1 to 3 of the
        pool are overwritten, so there must be no request. Nothing is loaded if the pool has fewer
        blocks.

        Args:
            shares_of: Returns the shares that :meth:`run` gets for a policy.

        """
        for name, policy in self._policies.items():
            if not self.takes(name):
                continue
            shares = shares_of(name)
            for group_id, group in self._groups.items():
                group_shares = None if shares is None else shares[group_id]
                if len(group.caches[0]) < 4:
                    continue
                rule = group.state.rule
                tokens = max(2, blocks_for(rule.page_tokens, rule.block_size)) * rule.block_size
                end = tokens + rule.window
                blocks = [1 + index % 2 for index in range(blocks_for(end, rule.block_size))]
                # Probes with prose features have separate kernels.
                weights = {0.0, max(group.probes, default=0.0)}
                for (store, in_place), prose in product((([3], False), ([1], True)), weights):
                    due = Due(0, 0, end, 0, tokens, 0, blocks, store, in_place=in_place)
                    self._launch(policy, group, [due], group_shares, bool(group.rings), prose)
                group.state.clear([0])

    def _launch(
        self,
        policy: Policy,
        group: _Group,
        due: Sequence[Due],
        shares: torch.Tensor | None,
        recorded: bool,
        prose: float = 0.0,
    ) -> torch.Tensor:
        """Run evictions of E requests, and return the pages [E, L, H] int32 that heads kept."""
        count, layers = len(group.caches), len(group.caches)
        if self._workspace is not None:
            tokens = max(eviction.num_tokens for eviction in due) * len(due)
            count = group.sizes.layers_at_once(tokens, self._workspace)
        parts = []
        for start in range(0, layers, count):
            part = group.part(start, start + count)
            part_shares = None if shares is None else shares[start : start + count]
            batch, pages = self._evict(policy, part, due, part_shares, recorded, prose)
            parts.append(pages)
        pages = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        # Layers that follow read the tables of the former store.
        entered = [(eviction.row, eviction.tail_start, len(eviction.store)) for eviction in due]
        group.state.record_all(entered, batch.rows, batch.tail_starts, batch.store, pages)
        return pages

    def _evict(
        self,
        policy: Policy,
        group: _Group,
        due: Sequence[Due],
        shares: torch.Tensor | None,
        recorded: bool,
        prose: float,
    ) -> tuple[EvictionBatch, torch.Tensor]:
        """Score the candidates in L layers and move the survivors.

        Returns:
            The batch, and the pages [E, L, H] int32 that heads kept.

        """
        state, scorer = group.state, policy.scorer
        split = group.head_indptr
        layers = WindowLayers(
            group.caches,
            group.rings,
            group.scales,
            split,
            state.stores,
            group.softcap,
            group.token_format,
            group.centres,
        )
        batch = EvictionBatch.build(
            due,
            len(group.caches),
            state.num_heads,
            state.rule.block_size,
            state.rule.window,
            split.device,
            state.rule.page_tokens,
        )
        # [C, candidates] floats that are kept with each token.
        made = None
        if isinstance(scorer, Probe):
            probes = group.probes[prose].layers(group.caches, group.kept, split, state.stores)
            window = layers if recorded and scorer.requirements.window != "none" else None
            scores, made = probe_scores(batch, probes, window, sum_of_ranks)
        elif isinstance(scorer, Defensive):
            scores, value_shares = defensive_scores(batch, layers, group.kept, sum_of_ranks)
            made = value_shares[None]
        else:
            assert isinstance(scorer, SnapKV)
            scores = window_scores(batch, layers, scorer.kernel, scorer.kind)
        rows = candidate_rows(batch, split)
        # A single head gets all pages of its layer.
        if isinstance(policy.allocator, Adaptive) and state.num_heads > 1:
            pages = batch_pages(batch, scores, rows, policy.allocator.floor)
        elif shares is not None and state.num_heads > 1:
            pages = batch_shared_pages(batch, shares, rows)
        else:
            equal = rows.store_blocks.view(len(due), -1, 1)
            pages = equal.expand(-1, -1, state.num_heads).contiguous()
        columns = batch_columns(batch, scores, pages, rows)
        del scores
        compact(
            group.caches,
            columns,
            pages,
            batch,
            split,
            state.stores,
            group.token_format,
            group.stored_scales,
            group.centres,
        )
        if made is not None:
            keep_page_values(group.kept, made, columns, pages, batch, split, state.stores)
        return batch, pages


def obstacle(
    states: Mapping[int, GroupState],
    caches: "Mapping[str, LayerCache]",
    rings: ObservationRings | None,
) -> str | None:
    """Return the reason why the kernels cannot serve these layers; None if they can."""
    for state in states.values():
        names = state.layer_names
        stored = {caches[name].stored.dtype for name in names}
        sizes = {caches[name].layout.keys.shape[-1] for name in names}
        dtype = next(iter(stored)) if rings is None else rings.layer(names[0]).dtype
        problems = {
            f"{len(names)} layers in a group, but at most {MAX_LAYERS}": (len(names) > MAX_LAYERS),
            f"blocks of {state.rule.block_size} tokens, but {BLOCK_SIZES}": (
                state.rule.block_size not in BLOCK_SIZES
            ),
            f"head size {min(sizes)}, but {HEAD_SIZES}": min(sizes) not in HEAD_SIZES,
            f"{dtype}, but float16, bfloat16 and float32": dtype not in {*DTYPES, FP8},
            "a KV cache that is neither FP8 nor of the model's dtype in every layer": (
                len(stored) > 1 or not stored <= {dtype, FP8}
            ),
            "values of another size than their keys": (
                sizes != {caches[name].layout.values.shape[-1] for name in names}
            ),
            "attention sinks": any(caches[name].sinks is not None for name in names),
            "stores of this format": not all(
                caches[name].token_format.as_cached
                or isinstance(caches[name].token_format, PackedFormat)
                for name in names
            ),
            "stores in few bits beside an FP8 cache": any(
                caches[name].is_fp8 and not caches[name].token_format.as_cached for name in names
            ),
            "logit soft caps that differ between layers": (
                len({caches[name].softcap for name in names}) > 1
            ),
        }
        for problem, applies in problems.items():
            if applies:
                return f"the CUDA kernels do not serve {problem}"
    return None


def launches(due: Sequence[Due], longest: int) -> Iterator[list[Due]]:
    """Split evictions into launches that need no more workspace than one of ``longest`` tokens."""
    launch: list[Due] = []
    for eviction in due:
        max_tokens = max(other.num_tokens for other in [*launch, eviction])
        if launch and max_tokens * (len(launch) + 1) > longest:
            yield launch
            launch = []
        launch.append(eviction)
    if launch:
        yield launch


def _group(
    state: GroupState,
    caches: "Mapping[str, LayerCache]",
    rings: ObservationRings | None,
    token_stats: TokenStats | None,
    probes: Probes | None,
    longest: int,
) -> _Group:
    names = state.layer_names
    kept = [token_stats.layer(name) for name in names] if token_stats is not None else []
    bs, first = state.rule.block_size, caches[names[0]]
    shape = (-1, state.num_heads, bs)
    heads, head_size = state.num_heads, first.layout.keys.shape[-1]
    query_heads = 0 if rings is None else rings.layer(names[0]).shape[1]
    sizes = EvictionSizes(
        layers=len(names),
        heads=heads,
        query_rows=query_heads // heads * state.rule.window,
        head_size=head_size,
        block_size=bs,
        slot_bytes=2 * head_size * first.stored.itemsize,
        made=kept[0].shape[-1] if kept else 0,
    )
    centres = [caches[name].centres for name in names if caches[name].centres is not None]
    return _Group(
        state=state,
        caches=[
            caches[name].stored.view(*shape, 2 * caches[name].layout.keys.shape[-1])
            for name in names
        ],
        rings=[] if rings is None else [rings.layer(name) for name in names],
        scales=[
            caches[name].scale * caches[name].query_scale * caches[name].key_scale for name in names
        ],
        softcap=caches[names[0]].softcap,
        token_format=first.token_format,
        stored_scales=[(caches[name].key_scale, caches[name].value_scale) for name in names],
        centres=torch.stack(centres) if centres else None,
        kept=kept,
        probes={} if probes is None else _by_weight(probes, caches, names, longest),
        sizes=sizes,
    )


def _by_weight(
    probes: Probes, caches: "Mapping[str, LayerCache]", names: Sequence[str], longest: int
) -> dict[float, GroupProbes]:
    """Return the probes of a group by the weight of prose, except those no kernel can serve."""
    # Networks do not depend on the weight of prose.
    networks = group_networks(probes.by_weight[0.0], caches, names)
    by_weight = {
        weight: GroupProbes.of(layers, caches, names, longest, networks)
        for weight, layers in probes.by_weight.items()
    }
    return {weight: group for weight, group in by_weight.items() if group is not None}


def _due(eviction: Eviction, group: GroupEviction, row: int) -> Due:
    return Due(
        row=row,
        ring=eviction.ring or 0,
        num_tokens=eviction.num_tokens,
        old_tail_start=group.old_tail_start,
        tail_start=group.tail_start,
        old_store_blocks=len(group.old_store),
        positional=group.positional,
        store=group.store,
        protect_first=eviction.protect_first,
        in_place=group.reused > 0,
    )

"""The due evictions of a step in a few launches of the CUDA operations: the host never waits."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch

from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.ops.cuda.allocate import batch_pages, batch_shared_pages
from vllm_kvevict.ops.cuda.batch import Due, EvictionBatch
from vllm_kvevict.ops.cuda.defensive import NEIGHBOURS, REACH, defensive_scores
from vllm_kvevict.ops.cuda.limits import (
    BLOCK_SIZES,
    CHUNK,
    DTYPES,
    HEAD_SIZES,
    MOST_LAYERS,
    rows_at_once,
)
from vllm_kvevict.ops.cuda.pages import STAGING_BYTES, compact
from vllm_kvevict.ops.cuda.probe import probe_scores
from vllm_kvevict.ops.cuda.rows import candidate_rows
from vllm_kvevict.ops.cuda.score import WindowLayers, window_scores
from vllm_kvevict.ops.cuda.select import batch_columns
from vllm_kvevict.ops.cuda.token_stats import keep_page_values
from vllm_kvevict.ops.fp8 import FP8
from vllm_kvevict.policies.allocators import Adaptive
from vllm_kvevict.policies.base import Policy
from vllm_kvevict.policies.defensive import Defensive
from vllm_kvevict.policies.probe import Probe
from vllm_kvevict.policies.snapkv import SnapKV
from vllm_kvevict.timeline.rule import blocks_for
from vllm_kvevict.timeline.step_plan import Eviction, GroupEviction
from vllm_kvevict.worker.fused_probes import GroupProbes
from vllm_kvevict.worker.probes import Probes
from vllm_kvevict.worker.ranks import sum_of_ranks

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
    """By what prose counts in them."""


class FusedEvictions:
    """Evictions of policies that score by the window's attention, or by probes of the keys.

    Scores, allocation, selection and compaction take one launch each for all layers of a group
    and as many due requests as fit its workspace.

    Args:
        policies: Scorer and allocator of every policy that an eviction may name.
        states: Device state of every group that evicts, by group id.
        caches: The caches of evictable layers by name.
        rings: Observation rings, or None where no policy reads queries.
        token_stats: Numbers beside the cached tokens, or None where no policy needs them.
        longest: Longest sequence in tokens. Requests share a launch while each, counted as long
            as the longest of them, adds up to no more.
        probes: The model's, or None where no policy reads them.

    Raises:
        ValueError: What :func:`obstacle` says.

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
    ) -> None:
        problem = obstacle(states, caches, rings)
        if problem is not None:
            raise ValueError(problem)
        self._policies = policies
        self._probes = probes
        self._longest = longest
        self._groups = {
            id_: _group(state, caches, rings, token_stats, probes, longest)
            for id_, state in states.items()
        }

    def takes(self, policy: str) -> bool:
        """Whether the kernels know a policy's scores."""
        scorer, groups = self._policies[policy].scorer, self._groups.values()
        if isinstance(scorer, Defensive | Probe):
            known = (scorer.kernel, scorer.reach) == (NEIGHBOURS, REACH)
            if isinstance(scorer, Probe) and self._probes is not None:
                known = known and not self._probes.has_networks
            needed = [one.probes if isinstance(scorer, Probe) else one.kept for one in groups]
            return known and all(needed)
        return isinstance(scorer, SnapKV)

    def run(
        self,
        policy: str,
        evictions: Sequence[Eviction],
        rows: Iterable[int],
        shares: HeadShares | None = None,
    ) -> list[torch.Tensor]:
        """Run evictions under one policy, each of another request, in the row given for it.

        Args:
            policy: One that it takes.
            evictions: Due ones.
            rows: Of the state tables.
            shares: What heads keep, where the policy follows measured shares.

        Returns:
            [L, H] int32 pages that every head kept of one of the requests, of each group.

        """
        by_group: dict[tuple[int, bool, float], list[Due]] = {}
        for eviction, row in zip(evictions, rows, strict=True):
            prose = self._probes.weight(eviction) if self._probes is not None else 0.0
            for group in eviction.groups:
                key = group.group_id, eviction.ring is not None, prose
                by_group.setdefault(key, []).append(_due(eviction, group, int(row)))
        kept: dict[int, torch.Tensor] = {}
        for (group_id, recorded, prose), due in by_group.items():
            due.sort(key=lambda one: one.in_place)
            scored, where = self._policies[policy], self._groups[group_id]
            of_heads = None if shares is None else shares[group_id]
            for part in launches(due, self._longest):
                pages = self._launch(scored, where, part, of_heads, recorded, prose)
                kept.setdefault(group_id, pages[0])
        return list(kept.values())

    def warm_up(self, shares_of: Callable[[str], HeadShares | None]) -> None:
        """Load every kernel that serves a policy, and its memory; nothing of it stays.

        CUDA loads a kernel at its first launch, which may wait for the device. Blocks 1 to 3 of the
        pool are used, so there must be no request; nothing is loaded where it has fewer.

        Args:
            shares_of: The shares that :meth:`run` gets for a policy.

        """
        for name, policy in self._policies.items():
            if not self.takes(name):
                continue
            shares = shares_of(name)
            for group_id, group in self._groups.items():
                of_heads = None if shares is None else shares[group_id]
                if len(group.caches[0]) < 4:
                    continue
                timeline = group.state.timeline
                tokens = 2 * timeline.block_size
                end = tokens + timeline.window
                blocks = [1 + index % 2 for index in range(blocks_for(end, timeline.block_size))]
                # Probes with prose have kernels of their own.
                weights = {0.0, max(group.probes, default=0.0)}
                for (store, in_place), prose in product((([3], False), ([1], True)), weights):
                    one = Due(0, 0, end, 0, tokens, 0, blocks, store, in_place=in_place)
                    self._launch(policy, group, [one], of_heads, bool(group.rings), prose)
                group.state.clear([0])

    def _launch(
        self,
        policy: Policy,
        group: _Group,
        due: Sequence[Due],
        of_heads: torch.Tensor | None,
        recorded: bool,
        prose: float = 0.0,
    ) -> torch.Tensor:
        """[E, L, H] int32 pages that every head kept."""
        state, scorer = group.state, policy.scorer
        bs, split = state.timeline.block_size, state.head_indptr
        layers = WindowLayers(
            group.caches, group.rings, group.scales, split, state.stores, group.softcap
        )
        batch = EvictionBatch.build(
            due, len(group.caches), state.num_heads, bs, state.timeline.window, split.device
        )
        # What is kept of each candidate beside the cache [C, candidates].
        made = None
        if isinstance(scorer, Probe):
            probes = group.probes[prose].layers(group.caches, group.kept, split, state.stores)
            window = layers if recorded and scorer.requirements.window != "none" else None
            scores, made = probe_scores(batch, probes, window, sum_of_ranks)
        elif isinstance(scorer, Defensive):
            scores, shares = defensive_scores(batch, layers, group.kept, sum_of_ranks)
            made = shares[None]
        else:
            assert isinstance(scorer, SnapKV)
            scores = window_scores(batch, layers, scorer.kernel, scorer.kind)
        rows = candidate_rows(batch, split)
        # One head takes all pages of its layer.
        if isinstance(policy.allocator, Adaptive) and state.num_heads > 1:
            pages = batch_pages(batch, scores, rows, policy.allocator.floor)
        elif of_heads is not None and state.num_heads > 1:
            pages = batch_shared_pages(batch, of_heads, rows)
        else:
            equal = rows.store_blocks.view(len(due), -1, 1)
            pages = equal.expand(-1, -1, state.num_heads).contiguous()
        columns = batch_columns(batch, scores, pages, rows)
        del scores
        compact(group.caches, columns, pages, batch, split, state.stores)
        if made is not None:
            keep_page_values(group.kept, made, columns, pages, batch, split, state.stores)
        entered = [(one.row, one.tail_start, len(one.store)) for one in due]
        state.record_all(entered, batch.rows, batch.tail_starts, batch.store, pages)
        return pages


def obstacle(
    states: Mapping[int, GroupState],
    caches: "Mapping[str, LayerCache]",
    rings: ObservationRings | None,
) -> str | None:
    """Why the kernels cannot serve these layers, in one sentence; None where they can."""
    for state in states.values():
        names = state.layer_names
        stored = {caches[name].stored.dtype for name in names}
        sizes = {caches[name].layout.keys.shape[-1] for name in names}
        dtype = next(iter(stored)) if rings is None else rings.layer(names[0]).dtype
        found = {
            f"{len(names)} layers in a group, and not up to {MOST_LAYERS}": (
                len(names) > MOST_LAYERS
            ),
            f"blocks of {state.timeline.block_size} tokens, and not {BLOCK_SIZES}": (
                state.timeline.block_size not in BLOCK_SIZES
            ),
            f"head size {min(sizes)}, and not {HEAD_SIZES}": min(sizes) not in HEAD_SIZES,
            f"{dtype}, and not float16, bfloat16 or float32": dtype not in {*DTYPES, FP8},
            "a KV cache neither FP8 nor of the model's dtype in every layer": (
                len(stored) > 1 or not stored <= {dtype, FP8}
            ),
            "values of another size than keys": (
                sizes != {caches[name].layout.values.shape[-1] for name in names}
            ),
            "attention sinks": any(caches[name].sinks is not None for name in names),
            "logit soft caps that differ between layers": (
                len({caches[name].softcap for name in names}) > 1
            ),
        }
        for problem, here in found.items():
            if here:
                return f"the CUDA kernels do not serve {problem}"
    return None


def workspace_bytes(
    layers: int,
    heads: int,
    query_rows: int,
    block_size: int,
    longest: int,
    slot_bytes: int,
    made: int = 0,
) -> int:
    """Most bytes that a launch works in.

    What survivors pass through in place takes the room of the scores, which are dead by then.

    Args:
        layers: Evictable layers on this rank.
        heads: KV heads on this rank.
        query_rows: Query heads of a KV head, times the window; 0 where no policy reads queries.
        block_size: Tokens in a page.
        longest: Longest sequence in tokens.
        slot_bytes: Bytes of a cached token of a head: key, value, and scales if any.
        made: Numbers that a policy makes of each token, to keep them beside the cache.

    """
    groups = blocks_for(query_rows, min(map(rows_at_once, HEAD_SIZES)))
    scores_and_sort = 4 * groups + 4 + 2 * 4 + blocks_for(8, block_size)
    kept_columns = 4
    lse = 4 * query_rows * (1 + 2 * blocks_for(longest, CHUNK))
    # A norm for each candidate, a sum for each token, a mean for each head; then what is kept.
    norms = (made > 0) * 4 * layers * (longest * (heads + 1) + heads)
    scoring = layers * heads * (longest * scores_and_sort + lse) + norms
    moving = max(STAGING_BYTES, heads * longest * slot_bytes)
    kept = layers * heads * longest * (kept_columns + made * 4)
    return kept + max(scoring, moving)


def launches(due: Sequence[Due], longest: int) -> Iterator[list[Due]]:
    """Split evictions into launches with no more workspace than one of ``longest`` tokens has."""
    launch: list[Due] = []
    for one in due:
        most = max(other.num_tokens for other in [*launch, one])
        if launch and most * (len(launch) + 1) > longest:
            yield launch
            launch = []
        launch.append(one)
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
    shape = (-1, state.num_heads, state.timeline.block_size)
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
        kept=kept,
        probes={} if probes is None else _by_weight(probes, caches, names, longest),
    )


def _by_weight(
    probes: Probes, caches: "Mapping[str, LayerCache]", names: Sequence[str], longest: int
) -> dict[float, GroupProbes]:
    """The probes of a group by what prose counts in them; empty where the kernels cannot."""
    found = {
        weight: GroupProbes.of(layers, caches, names, longest)
        for weight, layers in probes.by_weight.items()
    }
    return {weight: one for weight, one in found.items() if one is not None}


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

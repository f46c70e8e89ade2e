"""The due evictions of a step in a few launches of the CUDA operations: the host never waits."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_kvevict.cache.page_values import PageValues
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.ops.cuda.allocate import batch_pages
from vllm_kvevict.ops.cuda.batch import Due, EvictionBatch
from vllm_kvevict.ops.cuda.defensive import NEIGHBOURS, REACH, defensive_scores, keep_shares
from vllm_kvevict.ops.cuda.limits import (
    BLOCK_SIZES,
    CHUNK,
    DTYPES,
    HEAD_SIZES,
    MOST_LAYERS,
    rows_at_once,
)
from vllm_kvevict.ops.cuda.pages import STAGING_BYTES, compact
from vllm_kvevict.ops.cuda.rows import candidate_rows
from vllm_kvevict.ops.cuda.score import WindowLayers, window_scores
from vllm_kvevict.ops.cuda.select import batch_columns
from vllm_kvevict.ops.fp8 import FP8
from vllm_kvevict.policies.allocators import Adaptive
from vllm_kvevict.policies.base import Policy
from vllm_kvevict.policies.defensive import Defensive
from vllm_kvevict.policies.snapkv import SnapKV
from vllm_kvevict.schedule.step_plan import Eviction, GroupEviction
from vllm_kvevict.schedule.timeline import blocks_for
from vllm_kvevict.worker.ranks import sum_of_ranks

if TYPE_CHECKING:
    from vllm_kvevict.cache.layer_cache import LayerCache


@dataclass(frozen=True)
class _Group:
    state: GroupState
    caches: list[torch.Tensor]
    rings: list[torch.Tensor]
    scales: list[float]
    softcap: float
    kept: list[torch.Tensor]


class FusedEvictions:
    """Evictions of policies that score by the window's attention: SnapKV, PyramidKV, defensive.

    Scores, allocation, selection and compaction take one launch each for all layers of a group
    and as many due requests as fit its workspace.

    Args:
        policies: Scorer and allocator of every policy that an eviction may name.
        states: Device state of every group that evicts, by group id.
        caches: The caches of evictable layers by name.
        rings: Observation rings.
        page_values: Numbers beside the cached tokens, or None where no policy needs them.
        longest: Longest sequence in tokens. Requests share a launch while each, counted as long
            as the longest of them, adds up to no more.

    Raises:
        ValueError: What :func:`obstacle` says.

    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        states: Mapping[int, GroupState],
        caches: "Mapping[str, LayerCache]",
        rings: ObservationRings,
        page_values: PageValues | None,
        longest: int,
    ) -> None:
        problem = obstacle(states, caches, rings)
        if problem is not None:
            raise ValueError(problem)
        self._policies = policies
        self._longest = longest
        self._groups = {
            id_: _group(state, caches, rings, page_values) for id_, state in states.items()
        }

    def takes(self, policy: str) -> bool:
        """Whether the kernels know a policy's scores."""
        scorer = self._policies[policy].scorer
        if isinstance(scorer, Defensive):
            kept = [one for group in self._groups.values() for one in group.kept]
            return (scorer.kernel, scorer.reach) == (NEIGHBOURS, REACH) and bool(kept)
        return isinstance(scorer, SnapKV)

    def run(
        self, policy: str, evictions: Sequence[Eviction], rows: Iterable[int]
    ) -> list[torch.Tensor]:
        """Run evictions under one policy, each of another request, in the row given for it.

        Returns:
            [L, H] int32 pages that every head kept of one of the requests, of each group.

        """
        by_group: dict[int, list[Due]] = {}
        for eviction, row in zip(evictions, rows, strict=True):
            for group in eviction.groups:
                by_group.setdefault(group.group_id, []).append(_due(eviction, group, int(row)))
        kept: list[torch.Tensor] = []
        for group_id, due in by_group.items():
            due.sort(key=lambda one: one.in_place)
            scored, where = self._policies[policy], self._groups[group_id]
            parts = launches(due, self._longest)
            pages = [self._launch(scored, where, part) for part in parts]
            kept.append(pages[0][0])
        return kept

    def warm_up(self) -> None:
        """Load every kernel that serves a policy, and its memory; nothing of it stays.

        CUDA loads a kernel at its first launch, which may wait for the device. Blocks 1 to 3 of the
        pool are used, so there must be no request; nothing is loaded where it has fewer.
        """
        for name, policy in self._policies.items():
            if not self.takes(name):
                continue
            for group in self._groups.values():
                if len(group.caches[0]) < 4:
                    continue
                timeline = group.state.timeline
                tokens = 2 * timeline.block_size
                end = tokens + timeline.window
                blocks = [1 + index % 2 for index in range(blocks_for(end, timeline.block_size))]
                for store, in_place in (([3], False), ([1], True)):
                    one = Due(0, 0, end, 0, tokens, 0, blocks, store, in_place=in_place)
                    self._launch(policy, group, [one])
                group.state.clear([0])

    def _launch(self, policy: Policy, group: _Group, due: Sequence[Due]) -> torch.Tensor:
        """[E, L, H] int32 pages that every head kept."""
        state, scorer = group.state, policy.scorer
        assert isinstance(scorer, SnapKV | Defensive)
        bs, window, split = state.timeline.block_size, state.timeline.window, state.head_indptr
        layers = WindowLayers(
            group.caches, group.rings, group.scales, split, state.stores, group.softcap
        )
        batch = EvictionBatch.build(
            due, len(group.caches), state.num_heads, bs, window, split.device
        )
        shares = None
        if isinstance(scorer, Defensive):
            scores, shares = defensive_scores(batch, layers, group.kept, sum_of_ranks)
        else:
            scores = window_scores(batch, layers, scorer.kernel, scorer.kind)
        rows = candidate_rows(batch, split)
        # One head takes all pages of its layer.
        if isinstance(policy.allocator, Adaptive) and state.num_heads > 1:
            pages = batch_pages(batch, scores, rows, policy.allocator.floor)
        else:
            equal = rows.store_blocks.view(len(due), -1, 1)
            pages = equal.expand(-1, -1, state.num_heads).contiguous()
        columns = batch_columns(batch, scores, pages, rows)
        del scores
        compact(group.caches, columns, pages, batch, split, state.stores)
        if shares is not None:
            keep_shares(group.kept, shares, columns, pages, batch, split, state.stores)
        entered = [(one.row, one.tail_start, len(one.store)) for one in due]
        state.record_all(entered, batch.rows, batch.tail_starts, batch.store, pages)
        return pages


def obstacle(
    states: Mapping[int, GroupState],
    caches: "Mapping[str, LayerCache]",
    rings: ObservationRings,
) -> str | None:
    """Why the kernels cannot serve these layers, in one sentence; None where they can."""
    for state in states.values():
        names = state.layer_names
        ring = rings.layer(names[0])
        stored = {caches[name].stored.dtype for name in names}
        found = {
            f"{len(names)} layers in a group, and not up to {MOST_LAYERS}": (
                len(names) > MOST_LAYERS
            ),
            f"blocks of {state.timeline.block_size} tokens, and not {BLOCK_SIZES}": (
                state.timeline.block_size not in BLOCK_SIZES
            ),
            f"head size {ring.shape[-1]}, and not {HEAD_SIZES}": ring.shape[-1] not in HEAD_SIZES,
            f"{ring.dtype}, and not float16, bfloat16 or float32": ring.dtype not in DTYPES,
            "a KV cache neither FP8 nor of the model's dtype in every layer": (
                len(stored) > 1 or not stored <= {ring.dtype, FP8}
            ),
            "values of another size than keys": (
                any(caches[name].layout.values.shape[-1] != ring.shape[-1] for name in names)
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
    value_shares: bool = False,
) -> int:
    """Most bytes that a launch works in.

    What survivors pass through in place takes the room of the scores, which are dead by then.

    Args:
        layers: Evictable layers on this rank.
        heads: KV heads on this rank.
        query_rows: Query heads of a KV head, times the window.
        block_size: Tokens in a page.
        longest: Longest sequence in tokens.
        slot_bytes: Bytes of a cached token of a head: key, value, and scales if any.
        value_shares: Whether a policy weighs tokens by their values.

    """
    groups = blocks_for(query_rows, min(map(rows_at_once, HEAD_SIZES)))
    scores_and_sort = 4 * groups + 4 + 2 * 4 + blocks_for(8, block_size)
    kept_columns = 4
    lse = 4 * query_rows * (1 + 2 * blocks_for(longest, CHUNK))
    # A norm for each candidate, a sum for each token, a mean for each head; then the shares.
    norms = value_shares * 4 * layers * (longest * (heads + 1) + heads)
    scoring = layers * heads * (longest * scores_and_sort + lse) + norms
    moving = max(STAGING_BYTES, heads * longest * slot_bytes)
    kept = layers * heads * longest * (kept_columns + value_shares * 4)
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
    rings: ObservationRings,
    page_values: PageValues | None,
) -> _Group:
    names = state.layer_names
    kept = [page_values.layer(name) for name in names] if page_values is not None else []
    shape = (-1, state.num_heads, state.timeline.block_size)
    return _Group(
        state=state,
        caches=[
            caches[name].stored.view(*shape, 2 * rings.layer(name).shape[-1]) for name in names
        ],
        rings=[rings.layer(name) for name in names],
        scales=[
            caches[name].scale * caches[name].query_scale * caches[name].key_scale for name in names
        ],
        softcap=caches[names[0]].softcap,
        kept=[layer.squeeze(-1) for layer in kept if layer.shape[-1] == 1],
    )


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

"""The cached tokens of a request at an eviction, read for the policy that scores them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from zlib import crc32

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.ops.torch.observe import window_queries
from vllm_kvevict.ops.torch.pages import candidate_grid
from vllm_kvevict.ops.torch.value_shares import value_shares
from vllm_kvevict.policies.base import Candidates, Requirements
from vllm_kvevict.timeline.step_plan import Eviction, GroupEviction
from vllm_kvevict.worker.probes import Probes
from vllm_kvevict.worker.prompts import PromptDigests
from vllm_kvevict.worker.ranks import first_head, mean_of_ranks, sum_of_ranks
from vllm_kvevict.worker.runners import RunnerRows


@dataclass(frozen=True)
class Holdings:
    """The pages of one request in the L layers of a group, at an eviction.

    Args:
        eviction: The eviction.
        group: The eviction in this group.
        state: Device state of the group.
        row: State row of the request.
        grid: [L, H, P] int64 pages of the candidates and of the tokens after them.
        padding: [L, H] int64 padding pages at the left of each row.
        candidate_pages: Pages of a row that may be evicted, padding included.
        store: [S] int64 blocks that the survivors move to.

    """

    eviction: Eviction
    group: GroupEviction
    state: GroupState
    row: int
    grid: torch.Tensor
    padding: torch.Tensor
    candidate_pages: int
    store: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.state.timeline.block_size

    @property
    def store_pages(self) -> int:
        """Number of pages at the left of a row that hold the former store, padding included."""
        return self.grid.shape[-1] - len(self.group.positional)

    @cached_property
    def columns(self) -> torch.Tensor:
        """[N] int64 columns of the candidates."""
        return torch.arange(self.candidate_pages * self.block_size, device=self.grid.device)

    @cached_property
    def valid(self) -> torch.Tensor:
        """[L, H, N] bool: False on the padding."""
        return self.columns >= (self.padding * self.block_size)[..., None]

    @property
    def caps(self) -> torch.Tensor:
        """[L, H] int64 candidate pages of each head."""
        return self.candidate_pages - self.padding


@dataclass(frozen=True)
class CandidateReader:
    """Reads the inputs that a policy requires from the cache, the rings and the token stats.

    Args:
        caches: The caches of evictable layers by name.
        rings: Observation rings, or None if no policy reads them.
        token_stats: Floats of the cached tokens, or None if no policy keeps any.
        prompts: Digests of the prompts, or None if no policy draws random numbers.
        probes: Probes that score the keys, or None if no policy requires key scores.
        rows: Adapter of the model runner.

    """

    caches: Mapping[str, LayerCache]
    rings: ObservationRings | None
    token_stats: TokenStats | None
    prompts: PromptDigests | None
    probes: Probes | None
    rows: RunnerRows

    def holdings(
        self, eviction: Eviction, group: GroupEviction, state: GroupState, row: int
    ) -> Holdings:
        """Return the pages of a request in the layers of a group."""
        # The copy is pinned and asynchronous; a plain copy would wait for the forward pass.
        upload = partial(async_tensor_h2d, device=state.head_indptr.device, dtype=torch.int64)
        grid, padding = candidate_grid(
            state.indptr(row), upload(group.old_store), upload(group.positional)
        )
        tail_blocks = (group.tail_start - group.old_tail_start) // state.timeline.block_size
        pages = grid.shape[-1] - len(group.positional) + tail_blocks
        return Holdings(eviction, group, state, row, grid, padding, pages, upload(group.store))

    def made(self, needs: Requirements, holdings: Holdings) -> Sequence[torch.Tensor]:
        """Compute the floats that are computed once for each token and then kept with it.

        Returns:
            [H, N or more, C] float32 of each layer; empty for policies that require none.

        """
        if needs.value_shares:
            return self._value_shares(holdings)[..., None].unbind()
        return self._key_scores(holdings) if needs.key_scores else ()

    def candidates(
        self,
        needs: Requirements,
        holdings: Holdings,
        index: int,
        made: Sequence[torch.Tensor],
    ) -> Candidates:
        """Return the candidates of one layer, with the inputs that the policy requires.

        Args:
            needs: The policy's requirements.
            holdings: The pages of the request.
            index: Index of the layer in its group.
            made: The result of :meth:`made`.

        """
        state, eviction, group = holdings.state, holdings.eviction, holdings.group
        layer_name, grid = state.layer_names[index], holdings.grid[index]
        cache, bs, window = self.caches[layer_name], holdings.block_size, state.timeline.window
        columns = holdings.store_pages * bs + eviction.num_tokens - group.old_tail_start
        padding = holdings.padding[index] * bs
        observed = needs.window != "none" and eviction.ring is not None
        assert observed or needs.window != "required"
        read = grid if needs.keys or observed else grid[:, :0]
        accumulated = self._floats(layer_name, grid)[:, :columns] if needs.every_query else None
        values = cache.value_sequences(grid)[:, :columns] if needs.values else None
        shares = made[index][:, :columns, 0] if needs.value_shares else None
        key_scores, window_weights = None, None
        if needs.key_scores:
            assert self.probes is not None
            key_scores, window_weights = made[index], self.probes.at(eviction)[layer_name].window
        return Candidates(
            keys=cache.key_sequences(read)[:, :columns],
            valid=torch.arange(columns, device=grid.device) >= padding[:, None],
            queries=self._queries(holdings, layer_name) if observed else None,
            window=window,
            num_candidates=holdings.candidate_pages * bs,
            scale=cache.scale,
            softcap=cache.softcap,
            mean_of_ranks=mean_of_ranks,
            keep=len(group.store) * bs,
            seed=self._seed(eviction),
            layer=crc32(layer_name.encode()),
            row=holdings.row,
            layer_name=layer_name,
            first_head=first_head(state.num_heads),
            accumulated=accumulated,
            values=values,
            value_shares=shares,
            key_scores=key_scores,
            window_weights=window_weights,
            protected=eviction.protect_first,
            sinks=None if cache.sinks is None else cache.sinks.float(),
        )

    def _floats(self, layer_name: str, pages: torch.Tensor) -> torch.Tensor:
        """Return the first float of each token of pages [H, P], as [H, P * block_size]."""
        assert self.token_stats is not None
        return self.token_stats.layer(layer_name)[pages, :, 0].flatten(1)

    def _queries(self, holdings: Holdings, layer_name: str) -> torch.Tensor:
        """Return the queries [H, G, w, D] float32 of the observation window."""
        eviction, state = holdings.eviction, holdings.state
        assert self.rings is not None and eviction.ring is not None
        recorded = window_queries(
            self.rings.layer(layer_name), eviction.ring, eviction.num_tokens, state.timeline.window
        )
        seen = recorded.float() * self.caches[layer_name].query_scale
        return seen.unflatten(1, (state.num_heads, -1)).permute(1, 2, 0, 3)

    def _seed(self, eviction: Eviction) -> tuple[int, ...]:
        if self.prompts is None:
            return ()
        return self.prompts.digest(eviction.request_id), eviction.num_tokens

    def _value_shares(self, holdings: Holdings) -> torch.Tensor:
        """Return each head's share of the value norms of the grid's tokens.

        The share of a token of the store is the one that :meth:`TokenStats.keep` wrote. All other
        tokens are held by all heads, and their shares are computed here.

        Returns:
            [L, H, P * block_size] float32.

        """
        stored, norms, first = [], [], holdings.store_pages
        for name, pages in zip(holdings.state.layer_names, holdings.grid, strict=True):
            stored.append(self._floats(name, pages[:, :first]))
            norms.append(self.caches[name].value_norms(pages[:, first:]))
        shares = value_shares(torch.stack(norms), sum_of_ranks)
        return torch.cat([torch.stack(stored), shares], dim=-1)

    def _key_scores(self, holdings: Holdings) -> list[torch.Tensor]:
        """Return the probes' scores [H, N, C] of the candidates of each layer."""
        assert self.probes is not None
        eviction, group, state = holdings.eviction, holdings.group, holdings.state
        grid = holdings.grid[..., : holdings.candidate_pages]
        positions = self.rows.positions(eviction.request_id, group.old_tail_start, group.tail_start)
        on_device = async_tensor_h2d(positions, device=grid.device)
        end = eviction.num_tokens
        first, last = end - group.old_tail_start, end - group.tail_start
        ages = torch.arange(first, last, -1, device=grid.device)
        stored = holdings.store_pages
        return self.probes.scores(state, grid, stored, on_device, ages, eviction)

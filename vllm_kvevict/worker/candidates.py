"""The cached tokens of a request at an eviction, read for the policy that scores them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from zlib import crc32

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.ops.pieces import (
    by_layer,
    head_blocks,
    heads_at_once,
    joined,
    layers_at_once,
    width_in_place,
)
from vllm_kvevict.ops.torch.buffers import Buffers
from vllm_kvevict.ops.torch.observe import window_entries
from vllm_kvevict.ops.torch.pages import candidate_grid
from vllm_kvevict.ops.torch.value_shares import value_shares
from vllm_kvevict.policies.base import Candidates, Requirements
from vllm_kvevict.rules.rule import blocks_for
from vllm_kvevict.rules.step_plan import Eviction, GroupEviction
from vllm_kvevict.worker.probes import Probes
from vllm_kvevict.worker.prompts import PromptDigests
from vllm_kvevict.worker.ranks import first_head, mean_of_ranks, sum_of_ranks
from vllm_kvevict.worker.runners import RunnerRows


@dataclass(frozen=True)
class Holdings:
    """The pages of one request in L layers of a group, at an eviction.

    Args:
        eviction: The eviction.
        group: The eviction in this group.
        state: Device state of the group.
        first: Index of the first of the layers in the group.
        row: State row of the request.
        grid: [L, H, P] int64 pages of the candidates and of the tokens after them.
        padding: [L, H] int64 padding pages at the left of each row.
        candidate_pages: Pages of a row that may be evicted, padding included.
        store: [S] int64 blocks that the survivors move to.

    """

    eviction: Eviction
    group: GroupEviction
    state: GroupState
    first: int
    row: int
    grid: torch.Tensor
    padding: torch.Tensor
    candidate_pages: int
    store: torch.Tensor

    @property
    def layer_names(self) -> Sequence[str]:
        """Names of the L layers."""
        return self.state.layer_names[self.first : self.first + len(self.grid)]

    @property
    def block_size(self) -> int:
        return self.state.rule.block_size

    @property
    def page_tokens(self) -> int:
        """Tokens in a page of a store."""
        return self.state.rule.page_tokens

    @property
    def stored_columns(self) -> int:
        """Number of columns of the former store, padding included."""
        return self.store_pages * self.page_tokens

    @property
    def num_candidates(self) -> int:
        """Number of columns of the candidates."""
        new = self.candidate_pages - self.store_pages
        return self.stored_columns + new * self.block_size

    @property
    def num_columns(self) -> int:
        """Number of columns of the candidates and of the tokens after them."""
        return self.stored_columns + self.eviction.num_tokens - self.group.old_tail_start

    def parts(self) -> Iterator["Holdings"]:
        """Yield the pages of as many layers as are evicted together (``ops/pieces.py``)."""
        tokens = blocks_for(self.eviction.num_tokens, self.block_size) * self.block_size
        layers, heads = self.grid.shape[:2]
        count = layers_at_once(self.grid.device, layers, heads, tokens)
        for start in range(0, layers, count):
            part = slice(start, start + count)
            grid, padding = self.grid[part], self.padding[part]
            yield replace(self, first=self.first + start, grid=grid, padding=padding)

    @property
    def store_pages(self) -> int:
        """Number of pages at the left of a row that hold the former store, padding included."""
        return self.grid.shape[-1] - len(self.group.positional)

    @cached_property
    def columns(self) -> torch.Tensor:
        """[N] int64 columns of the candidates."""
        return torch.arange(self.num_candidates, device=self.grid.device)

    @cached_property
    def valid(self) -> torch.Tensor:
        """[L, H, N] bool: False on the padding."""
        return self.columns >= (self.padding * self.page_tokens)[..., None]

    @property
    def caps(self) -> torch.Tensor:
        """[L, H] int64 pages of a store that the candidates of each head can fill."""
        return self.num_candidates // self.page_tokens - self.padding


@dataclass(frozen=True)
class Inputs:
    """Inputs of scores that are read for L layers at once.

    Args:
        made: [L, H, N or more, C] float32: the floats that are computed once for each token and
            then kept with it; None for policies that require none.
        queries: [L * H, G, w, D] float32 queries of the observation window; None if the policy
            reads none or none were recorded.

    """

    made: torch.Tensor | None
    queries: torch.Tensor | None


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
    _buffers: Buffers = field(default_factory=Buffers, init=False)

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        """Numbers of the layers by name, the same on every rank and in every run."""
        return {name: crc32(name.encode()) for name in self.caches}

    def holdings(
        self, eviction: Eviction, group: GroupEviction, state: GroupState, row: int
    ) -> Holdings:
        """Return the pages of a request in the layers of a group."""
        # The copy is pinned and asynchronous; a plain copy would wait for the forward pass.
        upload = partial(async_tensor_h2d, device=state.head_indptr.device, dtype=torch.int64)
        grid, padding = candidate_grid(
            state.indptr(row), upload(group.old_store), upload(group.positional)
        )
        tail_blocks = (group.tail_start - group.old_tail_start) // state.rule.block_size
        pages = grid.shape[-1] - len(group.positional) + tail_blocks
        return Holdings(eviction, group, state, 0, row, grid, padding, pages, upload(group.store))

    def free_buffers(self) -> None:
        """Drop what was computed for an eviction and is shared by its groups of layers."""
        self._buffers.clear()
        if self.probes is not None:
            self.probes.free_buffers()

    def inputs(self, needs: Requirements, holdings: Holdings) -> Inputs:
        """Read or compute the inputs that are needed for all layers at once."""
        made = None
        if needs.value_shares:
            made = self._value_shares(holdings)[..., None]
        elif needs.key_scores:
            made = self._key_scores(holdings)
        if made is not None and holdings.group.old_store:
            columns = len(holdings.columns)
            made[:, :, :columns].masked_fill_(~holdings.valid[..., None], 0.0)
        observed = needs.window != "none" and holdings.eviction.ring is not None
        assert observed or needs.window != "required"
        return Inputs(made, self._queries(holdings) if observed else None)

    def blocks(self, needs: Requirements, holdings: Holdings) -> Iterator[slice]:
        """Yield the blocks of the L * H heads that are scored together."""
        num_heads, device = holdings.grid.shape[1], holdings.grid.device
        first = self.caches[holdings.layer_names[0]]
        together = needs.heads_alone or needs.layers_alone
        at_once = num_heads
        if together:
            rows = 1
            if self.rings is not None and needs.window != "none":
                query_heads = self.rings.layer(holdings.layer_names[0]).shape[1]
                rows = query_heads // num_heads * holdings.state.rule.window
            width = first.layout.keys.shape[1]
            if needs.keys_in_place:
                width = width_in_place(width, 4 if first.is_fp8 else first.pages.itemsize)
            width = max(rows, width)
            reads = needs.keys or needs.values or holdings.eviction.ring is not None
            if device.type == "cpu" and not reads:
                # Neither keys nor values are read, so a column is one number.
                width = 1
            at_once = heads_at_once(device, num_heads, holdings.num_columns * width)
            if not needs.heads_alone:
                at_once = max(at_once, num_heads)
        kinds = [
            (None if together else index, cache.scale, cache.softcap, cache.sinks is None)
            for index, cache in enumerate(map(self.caches.__getitem__, holdings.layer_names))
        ]
        return head_blocks(kinds, num_heads, at_once)

    def candidates(
        self, needs: Requirements, holdings: Holdings, heads: slice, inputs: Inputs
    ) -> Candidates:
        """Return the candidates of a block of heads, with the inputs that the policy requires.

        Args:
            needs: The policy's requirements.
            holdings: The pages of the request.
            heads: One of :meth:`blocks`.
            inputs: The result of :meth:`inputs`.

        """
        eviction, made, stored = holdings.eviction, inputs.made, holdings.store_pages
        parts = list(by_layer(heads, holdings.grid.shape[1]))
        names = [holdings.layer_names[layer] for layer, _ in parts]
        numbers = tuple(self._numbers[name] for name in names)
        caches = [self.caches[name] for name in names]
        grids = [holdings.grid[layer, some] for layer, some in parts]
        columns, padded = holdings.num_columns, bool(holdings.group.old_store)
        padding = holdings.padding.flatten()[heads] * holdings.page_tokens
        observed = inputs.queries is not None
        read = [grid if needs.keys or observed else grid[:, :0] for grid in grids]
        sequences = [
            cache.key_sequences(pages, stored, some)
            for cache, pages, (_, some) in zip(caches, read, parts, strict=True)
        ]
        keys = joined(sequences)[:, :columns]
        del sequences
        valid = torch.arange(columns, device=padding.device) >= padding[:, None]
        accumulated = values = None
        if needs.every_query:
            floats = [
                self._floats(name, grid, stored) for name, grid in zip(names, grids, strict=True)
            ]
            accumulated = joined(floats)[:, :columns]
        if needs.values:
            tokens = [c.value_sequences(g, stored) for c, g in zip(caches, grids, strict=True)]
            values = joined(tokens)[:, :columns]
        if padded:
            # These are copies of pages. Without this, padding has the contents of page 0.
            for copied in (keys, values, accumulated):
                if copied is not None and copied.shape[1]:
                    copied.masked_fill_(~(valid if copied.ndim == 2 else valid[..., None]), 0.0)
        shares = key_scores = window_weights = sinks = None
        if needs.value_shares:
            assert made is not None
            shares = made.flatten(0, 1)[heads, :columns, 0]
        if needs.key_scores:
            assert self.probes is not None and made is not None
            probes = self.probes.at(eviction)
            key_scores = made.flatten(0, 1)[heads]
            window_weights = joined(
                [probes[name].window[some] for name, (_, some) in zip(names, parts, strict=True)]
            )
        if caches[0].sinks is not None:
            sinks = joined(
                [
                    cache.sinks[some].float()
                    for cache, (_, some) in zip(caches, parts, strict=True)
                    if cache.sinks is not None
                ]
            )
        return Candidates(
            keys=keys,
            valid=valid,
            queries=None if inputs.queries is None else inputs.queries[heads],
            window=holdings.state.rule.window,
            num_candidates=holdings.num_candidates,
            scale=caches[0].scale,
            softcap=caches[0].softcap,
            mean_of_ranks=mean_of_ranks,
            keep=len(holdings.group.store) * holdings.page_tokens,
            seed=self._seed(eviction),
            layer=numbers[0],
            layers=numbers,
            num_tokens=eviction.num_tokens,
            state_row=holdings.row if needs.keeps_state else None,
            layer_name=names[0],
            first_head=first_head(holdings.state.num_heads),
            accumulated=accumulated,
            values=values,
            value_shares=shares,
            key_scores=key_scores,
            window_weights=window_weights,
            protected=eviction.protect_first,
            sinks=sinks,
            padded=padded,
            buffers=self._buffers,
        )

    def _floats(self, layer_name: str, pages: torch.Tensor, store_pages: int) -> torch.Tensor:
        """Return the first float of each token of pages [H, P], of which the first are of a store,
        as [H, N]."""
        assert self.token_stats is not None
        floats = self.token_stats.layer(layer_name)[..., 0]
        if floats.shape[1] == self.caches[layer_name].layout.block_size:
            return floats[pages].flatten(1)
        stored, size = floats[pages[:, :store_pages]], self.caches[layer_name].layout.block_size
        positional = floats[pages[:, store_pages:], :size]
        return torch.cat([stored.flatten(1), positional.flatten(1)], dim=1)

    def _queries(self, holdings: Holdings) -> torch.Tensor:
        """Return the queries [L * H, G, w, D] float32 of the observation window."""
        eviction, state = holdings.eviction, holdings.state
        assert self.rings is not None and eviction.ring is not None
        entries = window_entries(
            eviction.ring, eviction.num_tokens, state.rule.window, holdings.grid.device
        )
        layers = []
        for name in holdings.layer_names:
            recorded = self.rings.layer(name).index_select(0, entries).float()
            scale = self.caches[name].query_scale
            layers.append(recorded if scale == 1 else recorded * scale)
        seen = torch.stack(layers).unflatten(2, (state.num_heads, -1))
        return seen.permute(0, 2, 3, 1, 4).flatten(0, 1)

    def _seed(self, eviction: Eviction) -> tuple[int, ...]:
        if self.prompts is None:
            return ()
        return self.prompts.digest(eviction.request_id), eviction.num_tokens

    def _value_shares(self, holdings: Holdings) -> torch.Tensor:
        """Return each head's share of the value norms of the grid's tokens.

        The share of a token of the store is the one that :meth:`TokenStats.keep` wrote. All other
        tokens are held by all heads, and their shares are computed here.

        Returns:
            [L, H, N] float32.

        """
        stored, norms, first = [], [], holdings.store_pages
        for name, pages in zip(holdings.layer_names, holdings.grid, strict=True):
            stored.append(self._floats(name, pages[:, :first], first))
            norms.append(self.caches[name].value_norms(pages[:, first:]))
        shares = value_shares(torch.stack(norms), sum_of_ranks)
        return torch.cat([torch.stack(stored), shares], dim=-1)

    def _key_scores(self, holdings: Holdings) -> torch.Tensor:
        """Return the probes' scores [L, H, N, C] of the candidates."""
        assert self.probes is not None
        eviction, group = holdings.eviction, holdings.group
        grid = holdings.grid[..., : holdings.candidate_pages]
        positions = self.rows.positions(eviction.request_id, group.old_tail_start, group.tail_start)
        on_device = async_tensor_h2d(positions, device=grid.device)
        end = eviction.num_tokens
        first, last = end - group.old_tail_start, end - group.tail_start
        ages = torch.arange(first, last, -1, device=grid.device)
        names, stored = holdings.layer_names, holdings.store_pages
        return self.probes.scores(names, grid, stored, on_device, ages, eviction)

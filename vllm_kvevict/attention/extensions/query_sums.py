"""Accumulated attention of all queries, for requests under a policy that requires it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.attention.extensions.base import AttentionExtension
from vllm_kvevict.attention.per_head import PerHeadBatch
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.ops.torch.column_sums import column_sums
from vllm_kvevict.rules.rule import blocks_for

if TYPE_CHECKING:
    from vllm_kvevict.ops.triton.every_query import Sequences

ELEMENTS = 2**22
"""Maximum number of key elements that one call copies, if it runs more than one request."""


class QuerySums(AttentionExtension):
    """Accumulates the attention of every query in the first float of each cached token."""

    serves_gpus: ClassVar[bool] = True

    def build(
        self,
        common: CommonAttentionMetadata,
        state: GroupState,
        rows: torch.Tensor,
        requests: torch.Tensor,
    ) -> "Accumulation":
        return Accumulation.build(common, state, rows, requests)

    def forward(
        self,
        state: GroupState,
        layer_name: str,
        query: torch.Tensor,
        batch: "Accumulation",
        output: torch.Tensor,
    ) -> None:
        # If layers share a cache, only the queries of its owner count.
        if state.owner(layer_name) != layer_name:
            return
        self.token_stats.reset(layer_name, batch.slots)
        sums = self.token_stats.layer(layer_name)[..., 0]
        batch.add(sums, self.caches[layer_name], query, state.layer_index[layer_name])

    def forward_on_gpu(
        self,
        state: GroupState,
        layer_name: str,
        batch: "Sequences",
        slots: torch.Tensor,
        output: torch.Tensor,
    ) -> bool:
        # Triton is needed on GPUs only.
        from vllm_kvevict.ops.triton.every_query import add_column_sums

        if state.owner(layer_name) == layer_name:
            self.token_stats.reset(layer_name, slots)
            add_column_sums(batch, self.token_stats.layer(layer_name))
        return False


@dataclass
class Accumulation:
    """R requests of a step, with all of their queries in it.

    Args:
        heads: The requests as sequences of one KV head each.
        counts: [R] queries of each request in this step.
        slots: [T'] int64: vLLM's slot mapping of the tokens of these queries.

    """

    heads: PerHeadBatch
    counts: list[int]
    slots: torch.Tensor

    @classmethod
    def build(
        cls,
        common: CommonAttentionMetadata,
        state: GroupState,
        rows: torch.Tensor,
        requests: torch.Tensor,
    ) -> "Accumulation":
        """Lay out some requests of a batch.

        Args:
            common: vLLM's metadata of the whole batch.
            state: The group's state.
            rows: [R] int64 state rows of these requests.
            requests: [R] int64 batch indices of these requests.

        """
        starts = common.query_start_loc.tolist()
        spans = [(starts[place], starts[place + 1]) for place in requests.tolist()]
        slots = torch.cat([common.slot_mapping[start:end] for start, end in spans])
        return cls(
            PerHeadBatch.build(common, state, rows, requests),
            [end - start for start, end in spans],
            slots.long(),
        )

    def add(self, values: torch.Tensor, cache: LayerCache, query: torch.Tensor, layer: int) -> None:
        """Add the attention of this step's queries to every cached token that they attend to.

        Args:
            values: [num_pages, page_tokens] float32 accumulated attention, updated in place. It
                must be 0 for tokens that are new in this step.
            cache: The layer's cache, this step's keys included.
            query: [T, query heads, D] of the whole batch.
            layer: Index of the layer in its group.

        """
        queries = self.heads.take(query[: self.heads.num_tokens])
        num_heads, bs = self.heads.num_heads, cache.layout.block_size
        as_cached = cache.token_format.as_cached
        offset = 0
        for first, last in self._runs(values.shape[1] * query.shape[2]):
            count = self.counts[first]
            sequences = slice(first * num_heads, last * num_heads)
            lengths = self.heads.seq_lens[layer, sequences]
            end = offset + len(lengths) * count
            grouped = queries[offset:end].unflatten(0, (len(lengths), count)).transpose(1, 2)
            if as_cached:
                pages = self.heads.table[layer, sequences]
                pages = pages[:, : blocks_for(int(lengths.max()), bs)].long()
                keys = cache.keys(pages).flatten(1, 2)
            else:
                page, slot, stored = self.heads.slots(layer, sequences, bs, cache.page_tokens)
                head = torch.arange(len(page))[:, None] % num_heads
                keys = cache.tokens(page, slot, stored, head)[0]
            sinks = None
            if cache.sinks is not None:
                sinks = cache.sinks.float().repeat(last - first, 1)
            sums = column_sums(grouped, keys, lengths, cache.scale, cache.softcap, sinks)
            # Unused entries of a row are page 0, of vLLM's null block, to which 0 is added.
            if as_cached:
                values[pages] += sums.view(*pages.shape, bs)
            else:
                values.index_put_((page, slot), sums, accumulate=True)
            offset = end

    def _runs(self, page_elements: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of requests with equal query counts, within :data:`ELEMENTS` per call."""
        first = 0
        width = self.heads.table.shape[2] * self.heads.num_heads * page_elements
        max_requests = max(1, ELEMENTS // max(1, width))
        for index, count in enumerate(self.counts):
            if index > first and (count != self.counts[first] or index - first >= max_requests):
                yield first, index
                first = index
        yield first, len(self.counts)

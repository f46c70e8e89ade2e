"""Attention with log-weights, for requests in which kept tokens represent evicted ones."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvevict.attention.extensions.base import AttentionExtension
from vllm_kvevict.attention.per_head import PerHeadBatch
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.ops.torch.estimator import weighted_attention
from vllm_kvevict.rules.rule import blocks_for

if TYPE_CHECKING:
    from vllm_kvevict.ops.triton.every_query import Sequences


class WeightedAttention(AttentionExtension):
    """Attention of evicted requests with the log-weights in the floats of their tokens."""

    replaces: ClassVar[bool] = True
    serves_gpus: ClassVar[bool] = True

    def build(
        self,
        common: CommonAttentionMetadata,
        state: GroupState,
        rows: torch.Tensor,
        requests: torch.Tensor,
    ) -> "WeightedBatch":
        return WeightedBatch.build(common, state, rows, requests)

    def forward(
        self,
        state: GroupState,
        layer_name: str,
        query: torch.Tensor,
        batch: "WeightedBatch",
        output: torch.Tensor,
    ) -> None:
        owner = state.owner(layer_name)
        log_weights, index = self.token_stats.layer(owner), state.layer_index[layer_name]
        batch.attend(self.caches[owner], log_weights, query, index, output)

    def forward_on_gpu(
        self,
        state: GroupState,
        layer_name: str,
        batch: "Sequences",
        slots: torch.Tensor,
        output: torch.Tensor,
    ) -> bool:
        # Triton is needed on GPUs only.
        from vllm_kvevict.ops.triton import every_query

        owner = state.owner(layer_name)
        floats, value_scale = self.token_stats.layer(owner), self.caches[owner].value_scale
        every_query.weighted_attention(batch, floats, output, value_scale)
        return True


@dataclass
class WeightedBatch:
    """R evicted requests of a step under a policy that weighs the tokens it keeps.

    Args:
        heads: The requests as sequences of one KV head each.
        counts: [R] queries of each request in this step.
        in_store: [L, R * H] int64 cached tokens of each sequence that are in its store. The tokens
            after them have weight 1.

    """

    heads: PerHeadBatch
    counts: list[int]
    in_store: torch.Tensor

    @classmethod
    def build(
        cls,
        common: CommonAttentionMetadata,
        state: GroupState,
        rows: torch.Tensor,
        requests: torch.Tensor,
    ) -> "WeightedBatch":
        """Lay out some evicted requests of a batch.

        Args:
            common: vLLM's metadata of the whole batch.
            state: The group's state.
            rows: [R] int64 state rows of these requests.
            requests: [R] int64 batch indices of these requests.

        """
        heads = PerHeadBatch.build(common, state, rows, requests)
        counts = common.query_start_loc.diff()[requests]
        tail = (common.seq_lens[requests] - state.tail_start[rows]).long()
        in_store = heads.seq_lens.long() - tail.repeat_interleave(state.num_heads)
        return cls(heads, counts.tolist(), in_store)

    def attend(
        self,
        cache: LayerCache,
        token_stats: torch.Tensor,
        query: torch.Tensor,
        layer: int,
        output: torch.Tensor,
    ) -> None:
        """Compute the attention of this step's queries, in float32, one request after another.

        Args:
            cache: The layer's cache, this step's tokens included.
            token_stats: [num_pages, page_tokens, at least 2] float32 log-weights of the store.
            query: [T, query heads, D] of the whole batch.
            layer: Index of the layer in its group.
            output: [T, query heads, D], written in place at the tokens of these requests.

        """
        num_heads, num_tokens = self.heads.num_heads, self.heads.num_tokens
        queries = self.heads.take(query[:num_tokens])
        result = torch.empty_like(queries)
        begin = 0
        for request, count in enumerate(self.counts):
            sequences = slice(request * num_heads, (request + 1) * num_heads)
            end = begin + count * num_heads
            by_head = queries[begin:end].unflatten(0, (num_heads, count)).float()
            attended = self._request(cache, token_stats, by_head, layer, sequences)
            result[begin:end] = attended.flatten(0, 1).to(result.dtype)
            begin = end
        self.heads.put(output[:num_tokens], result)

    def _request(
        self,
        cache: LayerCache,
        token_stats: torch.Tensor,
        queries: torch.Tensor,
        layer: int,
        sequences: slice,
    ) -> torch.Tensor:
        """Return the attention [H, q, G, D] float32 of ``queries`` [H, q, G, D] of a request."""
        count, bs = queries.shape[1], cache.layout.block_size
        lengths = self.heads.seq_lens[layer, sequences].long()[:, None]
        if cache.token_format.as_cached:
            pages = self.heads.table[layer, sequences, : blocks_for(int(lengths.max()), bs)].long()
            keys = cache.keys(pages).flatten(1, 2).float()
            values = cache.values(pages).flatten(1, 2).float()
            log_weights = token_stats[pages][..., :2].flatten(1, 2)
        else:
            page, slot, stored = self.heads.slots(layer, sequences, bs, cache.page_tokens)
            keys, values = cache.tokens(page, slot, stored, torch.arange(len(page))[:, None])
            log_weights = token_stats[page, slot][..., :2]
        column = torch.arange(keys.shape[1])
        # Slots after the last token hold values of former requests, which may be NaN.
        values = values.masked_fill((column >= lengths)[..., None], 0.0)
        tail = column >= self.in_store[layer, sequences, None]
        log_weights = log_weights.masked_fill(tail[..., None], 0.0)

        logits = torch.einsum("hqgd,hnd->hqgn", queries, keys) * cache.scale
        if cache.softcap:
            logits = torch.tanh(logits / cache.softcap) * cache.softcap
        seen = column < (lengths - count + 1 + torch.arange(count))[..., None]
        logits = logits.masked_fill(~seen[:, :, None], float("-inf")).flatten(1, 2)
        sinks = None
        if cache.sinks is not None:
            sinks = cache.sinks.float()[:, None].expand(-1, count, -1).flatten(1)
        return weighted_attention(logits, values, log_weights, sinks).view_as(queries)

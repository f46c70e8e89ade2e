"""The CPU attention backend: vLLM's CPU kernel, run per KV head for evicted requests."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_kvevict.attention.binding import Extended, GroupBinding, Observation
from vllm_kvevict.attention.per_head import PerHeadBatch
from vllm_kvevict.attention.stored import StoredBatch
from vllm_kvevict.ops.torch.observe import observe


@dataclass
class EvictingCPUMetadata(CPUAttentionMetadata):
    """Metadata of a step with evicted or recorded requests, or with requests of an extension.

    ``stock`` is vLLM's metadata of the requests that are not evicted, and ``stock_tokens`` are the
    indices of their tokens in the batch (None if those are all tokens). ``heads`` are the evicted
    requests without an extension; ``stored`` are these if their stores are in a format of their
    own.
    """

    binding: GroupBinding | None = None
    observation: Observation | None = None
    extended: Sequence[Extended] = ()
    heads: PerHeadBatch | None = None
    stored: StoredBatch | None = None
    stock: CPUAttentionMetadata | None = None
    stock_tokens: torch.Tensor | None = None


class EvictingCPUBackend(CPUAttentionBackend):
    """Registered as ``CPU_ATTN``, the only name that ``platforms/cpu.py`` accepts."""

    @staticmethod
    def get_impl_cls() -> type["EvictingCPUImpl"]:
        return EvictingCPUImpl

    @staticmethod
    def get_builder_cls() -> type["EvictingCPUMetadataBuilder"]:
        return EvictingCPUMetadataBuilder


class EvictingCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits a batch into evicted and other requests, once per step for all layers.

    The worker sets ``binding`` for groups that evict; without it the builder is vLLM's.
    """

    binding: GroupBinding | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        rows = self.binding.rows(common) if self.binding is not None else None
        if self.binding is None or rows is None:
            return super().build(common_prefix_len, common, fast_build)
        observation = self.binding.observation(common)
        evicted = self.binding.state.tail_start[rows] > 0
        any_evicted = bool(evicted.any())
        extended = self.binding.extended(common)
        if observation is None and not extended and not any_evicted:
            return super().build(common_prefix_len, common, fast_build)

        stock: CPUAttentionMetadata | None = None
        stock_tokens, heads, stored = None, None, None
        if any_evicted:
            plain = evicted & ~self.binding.state.weighted[rows]
            requests = plain.nonzero().flatten()
            if len(requests):
                evicted_requests = common, self.binding.state, rows[requests], requests
                if self.binding.as_cached:
                    heads = PerHeadBatch.build(*evicted_requests)
                else:
                    stored = StoredBatch.build(*evicted_requests)
            others = (~evicted).nonzero().flatten()
            if len(others):
                subset, stock_tokens = _subset(common, others)
                stock = super().build(common_prefix_len, subset, fast_build)
        else:
            stock = super().build(common_prefix_len, common, fast_build)
        batch = stock if stock is not None and stock_tokens is None else _batch_metadata(common)
        return EvictingCPUMetadata(
            **{field.name: getattr(batch, field.name) for field in fields(CPUAttentionMetadata)},
            binding=self.binding,
            observation=observation,
            extended=extended,
            heads=heads,
            stored=stored,
            stock=stock,
            stock_tokens=stock_tokens,
        )

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> CPUAttentionMetadata:
        """Build the metadata of a drafter's pass.

        The first pass is over the step's tokens, later passes are over draft tokens.
        """
        if self.binding is not None:
            self.binding.guesses = draft_index > 0
        return super().build_for_drafting(common_attn_metadata, draft_index)


class EvictingCPUImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention; evicted requests run as one sequence per (request, KV head)."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the attention of one layer.

        Args:
            layer: The attention layer.
            query: [T, query heads, D].
            key: [T, KV heads, D], already in the cache.
            value: [T, KV heads, D], already in the cache.
            kv_cache: [num_blocks, KV heads, block_size, 2 * D].
            attn_metadata: vLLM's metadata, or :class:`EvictingCPUMetadata`.
            output: [T, query heads, D], written in place.
            output_scale: Not supported by the CPU kernel.
            output_block_scale: Not supported by the CPU kernel.

        Returns:
            ``output``.

        """
        scales = (output_scale, output_block_scale)
        if not isinstance(attn_metadata, EvictingCPUMetadata):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *scales
            )
        name = layer.layer_name
        metadata = attn_metadata
        assert metadata.binding is not None
        state = metadata.binding.state
        if metadata.observation is not None and metadata.binding.scores(name):
            observe(metadata.binding.rings(name), query, *metadata.observation)
        if metadata.stock is not None:
            self._stock(layer, query, key, value, kv_cache, metadata, output)
        for extension, batch in metadata.extended:
            extension.forward(state, name, query, batch, output)
        index = state.layer_index[name]
        if metadata.heads is not None:
            self._per_head(layer, query, kv_cache, metadata.heads, index, output)
        if metadata.stored is not None:
            metadata.stored.attend(metadata.binding.cache(name), query, index, output)
        return output

    def _stock(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: EvictingCPUMetadata,
        output: torch.Tensor,
    ) -> None:
        tokens = metadata.stock_tokens
        if tokens is None:
            super().forward(layer, query, key, value, kv_cache, metadata.stock, output)
            return
        part = output.new_empty((len(tokens), *output.shape[1:]))
        super().forward(
            layer, query.index_select(0, tokens), key, value, kv_cache, metadata.stock, part
        )
        output.index_copy_(0, tokens, part)

    def _per_head(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        heads: PerHeadBatch,
        index: int,
        output: torch.Tensor,
    ) -> None:
        """Run all KV heads at once, or one after another if the layer has sinks.

        The kernel takes one sink for each query head of a launch.
        """
        if self.sinks is None:
            self._launch(layer, query, kv_cache, heads, index, output, None)
            return
        sinks = self.sinks.float().view(heads.num_heads, -1)
        for head, head_sinks in zip(heads.by_head, sinks, strict=True):
            self._launch(layer, query, kv_cache, head, index, output, head_sinks)

    def _launch(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        heads: PerHeadBatch,
        index: int,
        output: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        size = self.head_size
        pages = kv_cache.view(-1, 1, 2 * kv_cache.shape[2], size)
        key_pages, value_pages = pages.chunk(2, dim=2)
        queries = heads.take(query[: heads.num_tokens])
        result = torch.empty_like(queries)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=heads.num_sequences,
            num_heads=self.num_queries_per_kv,
            num_kv_heads=1,
            head_dim=size,
            seq_lens=heads.seq_lens[index],
            dtype=query.dtype,
            query_start_loc=heads.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=layer.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=key_pages,
            value_cache=value_pages,
            output=result,
            query_start_loc=heads.query_start_loc,
            seq_lens=heads.seq_lens[index],
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=heads.table[index],
            softcap=self.logits_soft_cap,
            scheduler_metadata=metadata,
            s_aux=sinks,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        heads.put(output[: heads.num_tokens], result)


def _subset(
    common: CommonAttentionMetadata, requests: torch.Tensor
) -> tuple[CommonAttentionMetadata, torch.Tensor]:
    """Return vLLM's metadata of some requests of a batch, and the indices [T'] of their tokens."""
    starts = common.query_start_loc[:-1][requests]
    counts = common.query_start_loc[1:][requests] - starts
    query_start_loc = torch.zeros(len(requests) + 1, dtype=torch.int32)
    query_start_loc[1:] = counts.cumsum(0)
    begin = (starts - query_start_loc[:-1]).long().repeat_interleave(counts)
    tokens = torch.arange(len(begin)) + begin
    subset = common.replace(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens=common.seq_lens[requests],
        num_reqs=len(requests),
        num_actual_tokens=len(tokens),
        max_query_len=int(counts.max()),
        block_table_tensor=common.block_table_tensor[requests],
        slot_mapping=common.slot_mapping[tokens],
        positions=None,
    )
    return subset, tokens


def _batch_metadata(common: CommonAttentionMetadata) -> CPUAttentionMetadata:
    """Return the fields of the batch, for readers of vLLM's metadata; no kernel runs on them."""
    return CPUAttentionMetadata(
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        query_start_loc=common.query_start_loc,
        max_seq_len=common.max_seq_len,
        seq_lens=common.seq_lens,
        block_table=common.block_table_tensor,
        slot_mapping=common.slot_mapping,
        scheduler_metadata=None,
    )

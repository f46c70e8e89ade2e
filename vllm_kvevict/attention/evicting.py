"""A GPU backend with eviction: what the derived backends share, whatever their stock kernel is."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvevict.attention.binding import GroupBinding
from vllm_kvevict.attention.choice import kernel_asked
from vllm_kvevict.attention.ragged import Decode, Extend, GroupBuffers, Recording
from vllm_kvevict.attention.triton_decode import decode
from vllm_kvevict.ops.fp8 import FP8
from vllm_kvevict.ops.triton.observe import observe_tokens
from vllm_kvevict.ops.triton.page_table import write_page_table


@dataclass
class EvictingMetadata:
    """A step of a group that evicts.

    ``stock`` is vLLM's metadata, in which evicted requests have length 0; what it computes for
    their tokens is overwritten. A decode step has only ``decode``, for all its requests alike, so
    that one graph serves them whether they are evicted or not. xformers, which runs in no FULL
    graph, has evicted requests with one query token in ``single`` instead.
    """

    binding: GroupBinding
    buffers: GroupBuffers
    num_actual_tokens: int
    recording: Recording | None
    stock: Any = None
    decode: Decode | None = None
    extend: Extend | None = None
    num_splits: int = 0
    single: Extend | None = None


class EvictingBackendMixin:
    """What vLLM asks of the backend's class."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A head page is one run of tokens only in ``LBHNC``."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Keys are split by the lengths of a batch."""
        return False


class EvictingBuilderMixin:
    """Lays out a step, once for all layers, without waiting for the device.

    The worker binds the builders of groups that evict; others are vLLM's own.
    """

    binding: GroupBinding | None = None
    buffers: GroupBuffers | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """FULL graphs for decode steps; mixed batches are split on the host, so PIECEWISE.

        xformers' ops allocate and compile by batch: PIECEWISE for all.
        """
        if kernel_asked(vllm_config) == "xformers":
            return AttentionCGSupport.NEVER
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return support if support.value < single.value else single

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        if self.buffers is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]
        return self.build(0, common_attn_metadata)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        common = common_attn_metadata
        stock = super().build  # type: ignore[misc]
        if self.binding is None or self.buffers is None:
            return stock(common_prefix_len, common, fast_build)
        rows = self.binding.rows(common)
        slots = self.binding.ring_slots(common)
        parts: dict[str, Any] = dict(
            binding=self.binding,
            buffers=self.buffers,
            num_actual_tokens=common.num_actual_tokens,
            num_splits=self.num_splits(common),
        )
        kernel = self.buffers.scratch.kernel
        if common.max_query_len == 1 and kernel != "xformers":
            plan, recording = self.buffers.decode(common, rows, slots)
            kept = recording if self.binding.records else None
            return EvictingMetadata(**parts, decode=plan, recording=kept)
        if rows is None:
            return stock(common_prefix_len, common, fast_build)
        state = self.buffers.state
        recorded = None
        if slots is not None and bool((slots >= 0).any()):
            recorded = self.buffers.recording(common, slots, state.timeline.window)
        evicted = state.evicted[rows]
        if not bool(evicted.any()):
            metadata = stock(common_prefix_len, common, fast_build)
            return EvictingMetadata(**parts, recording=recorded, stock=metadata)
        single = torch.zeros_like(evicted)
        if kernel != "flash":
            counts = common.query_start_loc_cpu.diff()[: len(rows)]
            single = evicted & (counts == 1)
        result = EvictingMetadata(**parts, recording=recorded)
        places = single.nonzero().flatten()
        if len(places) and kernel == "xformers":
            result.single = self.buffers.extend(common, rows[places], places)
        elif len(places):
            result.decode = self.buffers.some_decode(common, rows[places], places)
        places = (evicted & ~single).nonzero().flatten()
        if len(places):
            result.extend = self.buffers.extend(common, rows[places], places)
        if not bool(evicted.all()):
            hidden = self.buffers.hide(common.seq_lens, evicted)
            if common.max_query_len == 1:
                # vLLM's Triton attention divides by the length of a single query's keys.
                hidden = hidden.clamp(min=1)
            result.stock = stock(common_prefix_len, common.replace(seq_lens=hidden), fast_build)
        return result

    def num_splits(self, common: CommonAttentionMetadata) -> int:
        """Splits that FlashAttention may make of one sequence; 0 leaves it to the kernel."""
        return 0


class EvictingImplMixin:
    """Stock attention for some requests, per-head attention for the others."""

    num_queries_per_kv: int
    scale: float
    logits_soft_cap: float

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    @abstractmethod
    def attend_pages(
        self,
        layer: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        query_start_loc: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        num_splits: int,
    ) -> None:
        """Causal attention of N sequences with G query heads and one KV head.

        Args:
            layer: The attention layer.
            query: [queries, G, D]; FP8 where vLLM quantises queries for an FP8 cache.
            keys: [pages, block_size, 1, D], a view of the cache; ``values`` likewise. uint8 holds
                FP8.
            values: As said.
            out: [queries, G, D], written in place.
            query_start_loc: [N + 1] int32.
            lengths: [N] int32 cached tokens.
            table: [N, V] int32 head pages.
            max_query_len: Longest query.
            max_seq_len: At least the longest sequence.
            num_splits: As :meth:`EvictingBuilderMixin.num_splits`.

        """

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            layer: The attention layer.
            query: [T, query heads, D].
            key: [T, KV heads, D], already in the cache.
            value: [T, KV heads, D], already in the cache.
            kv_cache: [num_blocks, KV heads, block_size, 2 * D].
            attn_metadata: vLLM's, or ours.
            output: [T, query heads, D], written in place.
            output_scale: Not supported with ours.
            output_block_scale: Not supported with ours.

        Returns:
            ``output``.

        Raises:
            NotImplementedError: Fused output quantisation is asked for.

        """
        scales = (output_scale, output_block_scale)
        stock = super().forward  # type: ignore[misc]
        if not isinstance(attn_metadata, EvictingMetadata):
            return stock(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("KV eviction has no attention with quantised output")
        metadata, name = attn_metadata, layer.layer_name
        state = metadata.buffers.state
        if (seen := metadata.recording) is not None:
            observe_tokens(
                metadata.binding.rings(name),
                query,
                seen.seq_lens,
                seen.tokens,
                seen.places,
                seen.back,
                seen.slots,
                state.timeline.window,
            )
        if metadata.stock is not None:
            stock(layer, query, key, value, kv_cache, metadata.stock, output)
        if metadata.decode is not None:
            self._decode(layer, query, kv_cache, metadata, metadata.decode, output)
        if metadata.single is not None:
            self._extend(layer, query, kv_cache, metadata, metadata.single, output)
        if metadata.extend is not None:
            self._extend(layer, query, kv_cache, metadata, metadata.extend, output)
        return output

    def _decode(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: EvictingMetadata,
        plan: Decode,
        output: torch.Tensor,
    ) -> None:
        buffers = metadata.buffers
        index = buffers.state.layer_index[layer.layer_name]
        if buffers.scratch.kernel == "triton":
            scale = self.scale * layer._k_scale_float
            if query.dtype == FP8:
                scale *= layer._q_scale_float
            caps = (self.logits_soft_cap, layer._v_scale_float)
            decode(query, kv_cache, output, plan, buffers, index, scale, *caps)
            return
        assert plan.in_order
        requests, size = len(plan.rows), query.shape[2]
        sequences = requests * buffers.state.num_heads
        table = buffers.scratch.table[:sequences]
        self._write_table(plan, buffers, index, table)
        self.attend_pages(
            layer,
            query[:requests].reshape(sequences, -1, size),
            *head_pages(kv_cache),
            output[:requests].view(sequences, -1, size),
            plan.query_start_loc,
            plan.lengths[index, :sequences],
            table,
            1,
            plan.max_seq_len,
            metadata.num_splits,
        )

    def _extend(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: EvictingMetadata,
        plan: Extend,
        output: torch.Tensor,
    ) -> None:
        buffers = metadata.buffers
        index, size = buffers.state.layer_index[layer.layer_name], query.shape[2]
        self._write_table(plan, buffers, index, plan.table)
        queries = query.reshape(-1, self.num_queries_per_kv, size).index_select(0, plan.order)
        result = torch.empty_like(queries, dtype=output.dtype)
        if buffers.attend is not None:
            lengths, scratch = plan.lengths[index], buffers.scratch
            buffers.attend(queries, kv_cache, result, plan, lengths, self.scale, scratch)
        else:
            self.attend_pages(
                layer,
                queries,
                *head_pages(kv_cache),
                result,
                plan.query_start_loc,
                plan.lengths[index],
                plan.table,
                plan.max_query_len,
                plan.max_seq_len,
                metadata.num_splits,
            )
        output.view(-1, *result.shape[1:]).index_copy_(0, plan.order, result)

    def _write_table(
        self, plan: Decode | Extend, buffers: GroupBuffers, index: int, table: torch.Tensor
    ) -> None:
        state = buffers.state
        write_page_table(
            plan.rows,
            plan.places,
            state.tail_start,
            state.stores,
            state.head_indptr[index],
            plan.block_table,
            plan.lengths[index],
            table,
            state.timeline.block_size,
        )


def head_pages(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [num_blocks * H, block_size, 1, D], views of [num_blocks, H, bs, 2 * D].

    Strides of the dimension of size 1 are those of one head, as TMA asks for.
    """
    blocks, heads, page, content = kv_cache.shape
    size = content // 2
    shape = (blocks * heads, page, 1, size)
    strides = (page * content, content, size, 1)
    offset = kv_cache.storage_offset()
    return (
        kv_cache.as_strided(shape, strides, offset),
        kv_cache.as_strided(shape, strides, offset + size),
    )

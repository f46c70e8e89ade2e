"""Common parts of the GPU attention backends with eviction."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvevict.attention.gpu_extensions import extend_attention
from vllm_kvevict.attention.gpu_step import EvictingMetadata
from vllm_kvevict.attention.sequences import Decode, Extend, Recording
from vllm_kvevict.attention.triton_decode import decode
from vllm_kvevict.attention.unpacked import unpacked
from vllm_kvevict.ops.fp8 import FP8
from vllm_kvevict.ops.triton.decode import Ring
from vllm_kvevict.ops.triton.observe import observe_tokens


class EvictingBackendMixin:
    """Capabilities that vLLM reads from the backend class."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return ``LBHNC``, the only layout in which the tokens of a head page are contiguous."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return False, because keys are split by the lengths of a batch."""
        return False


class EvictingImplMixin:
    """vLLM's attention for requests that are not evicted, per-head attention for the others."""

    num_queries_per_kv: int
    num_kv_heads: int
    scale: float
    logits_soft_cap: float
    sinks: torch.Tensor | None

    serves_all_sinks: ClassVar[bool] = True
    """True if :meth:`attend_pages` takes the sinks of every query, False for one KV head's."""

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
        sinks: torch.Tensor | None,
    ) -> None:
        """Compute causal attention of N sequences with G query heads and one KV head.

        Args:
            layer: The attention layer.
            query: [queries, G, D]; FP8 if vLLM quantises queries for an FP8 cache.
            keys: [pages, block_size, 1, D], a view of the cache; uint8 holds FP8.
            values: [pages, block_size, 1, D], a view of the cache; uint8 holds FP8.
            out: [queries, G, D], written in place.
            query_start_loc: [N + 1] int32.
            lengths: [N] int32 cached tokens.
            table: [N, V] int32 head pages.
            max_query_len: Length of the longest query.
            max_seq_len: Upper bound of the longest sequence.
            num_splits: From :meth:`.EvictingBuilderMixin.num_splits`.
            sinks: [queries, G] float32 attention sinks, or [G] if the class runs one KV head at a
                time; None for none.

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
        """Compute the attention of one layer.

        Args:
            layer: The attention layer.
            query: [T, query heads, D].
            key: [T, KV heads, D], already in the cache.
            value: [T, KV heads, D], already in the cache.
            kv_cache: [num_blocks, KV heads, block_size, 2 * D].
            attn_metadata: vLLM's metadata, or :class:`EvictingMetadata`.
            output: [T, query heads, D], written in place.
            output_scale: Not supported with :class:`EvictingMetadata`.
            output_block_scale: Not supported with :class:`EvictingMetadata`.

        Returns:
            ``output``.

        Raises:
            NotImplementedError: An output scale is given with :class:`EvictingMetadata`.

        """
        scales = (output_scale, output_block_scale)
        stock = super().forward  # type: ignore[misc]
        if not isinstance(attn_metadata, EvictingMetadata):
            return stock(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "KV eviction does not support attention with fused output quantisation"
            )
        metadata, name = attn_metadata, layer.layer_name
        state = metadata.buffers.state
        seen = metadata.recording if metadata.binding.scores(name) else None
        # In decode-only steps, the decode kernel or the page table also records the queries.
        fused = (step := metadata.decode) is not None and step.in_order
        if seen is not None and not fused:
            observe_tokens(
                metadata.binding.rings(name),
                query,
                seen.seq_lens,
                seen.tokens,
                seen.places,
                seen.back,
                seen.slots,
                state.rule.window,
            )
        if metadata.stock is not None:
            stock(layer, query, key, value, kv_cache, metadata.stock, output)
        if metadata.decode is not None:
            ring = seen if fused else None
            self._decode(layer, query, kv_cache, metadata, metadata.decode, ring, output)
        if metadata.single is not None:
            self._extend(layer, query, kv_cache, metadata, metadata.single, output)
        if metadata.extend is not None:
            self._extend(layer, query, kv_cache, metadata, metadata.extend, output)
        for extended in metadata.extended:
            cache = metadata.binding.cache(name)
            extend_attention(extended, metadata.buffers, cache, name, query, kv_cache, output)
        return output

    def _decode(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: EvictingMetadata,
        step: Decode,
        recording: Recording | None,
        output: torch.Tensor,
    ) -> None:
        """Run requests with one query token each; ``recording`` names the queries to record."""
        buffers = metadata.buffers
        index = buffers.state.layer_index[layer.layer_name]
        ring = None
        if recording is not None:
            rings, window = metadata.binding.rings, buffers.state.rule.window
            entries = rings(layer.layer_name)
            ring = Ring(entries, recording.slots, recording.seq_lens, window)
        if step.slices is not None:
            scale = self.scale * layer._k_scale_float
            if query.dtype == FP8:
                scale *= layer._q_scale_float
            caps = (self.logits_soft_cap, layer._v_scale_float)
            last = self._sinks(), ring, metadata.binding.cache(layer.layer_name).centres
            decode(query, kv_cache, output, step, buffers, index, scale, *caps, *last)
            return
        assert step.in_order
        requests, size = len(step.rows), query.shape[2]
        sequences = requests * buffers.state.num_heads
        table = buffers.scratch.table[:sequences]
        buffers.write_table(step, index, table, query, ring)
        sinks = self._sinks()
        self.attend_pages(
            layer,
            query[:requests].reshape(sequences, -1, size),
            *head_pages(kv_cache),
            output[:requests].view(sequences, -1, size),
            step.query_start_loc,
            step.lengths[index, :sequences],
            table,
            1,
            step.max_seq_len,
            metadata.num_splits,
            None if sinks is None else sinks.repeat(requests, 1),
        )

    def _extend(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: EvictingMetadata,
        step: Extend,
        output: torch.Tensor,
    ) -> None:
        buffers = metadata.buffers
        index = buffers.state.layer_index[layer.layer_name]
        if buffers.scratch.packed is not None:
            centres = metadata.binding.cache(layer.layer_name).centres
            assert centres is not None
            for part, pages in unpacked(kv_cache, centres, step, buffers, index):
                self._attend_extended(layer, query, pages, metadata, part, output)
            return
        buffers.write_table(step, index, step.table)
        self._attend_extended(layer, query, kv_cache, metadata, step, output)

    def _attend_extended(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: EvictingMetadata,
        step: Extend,
        output: torch.Tensor,
    ) -> None:
        """Run requests whose page table of this layer is written."""
        buffers = metadata.buffers
        index, size = buffers.state.layer_index[layer.layer_name], query.shape[2]
        queries = query.reshape(-1, self.num_queries_per_kv, size).index_select(0, step.order)
        result = torch.empty_like(queries, dtype=output.dtype)
        if (kernel := buffers.scratch.optional) is not None:
            lengths, table = step.lengths[index], buffers.scratch.table
            kernel.attend(queries, kv_cache, result, step, lengths, self.scale, table)
        elif (sinks := self._sinks()) is None or self.serves_all_sinks:
            self.attend_pages(
                layer,
                queries,
                *head_pages(kv_cache),
                result,
                step.query_start_loc,
                step.lengths[index],
                step.table,
                step.max_query_len,
                step.max_seq_len,
                metadata.num_splits,
                None if sinks is None else sinks[step.order % self.num_kv_heads],
            )
        else:
            self._head_by_head(layer, queries, kv_cache, metadata, step, result, sinks)
        output.view(-1, *result.shape[1:]).index_copy_(0, step.order, result)

    def _head_by_head(
        self,
        layer: Any,
        queries: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: EvictingMetadata,
        step: Extend,
        result: torch.Tensor,
        sinks: torch.Tensor,
    ) -> None:
        """Launch each KV head separately, with its sequences and the sinks of its query heads."""
        heads, index = self.num_kv_heads, metadata.buffers.state.layer_index[layer.layer_name]
        # All KV heads of a request have the same number of queries.
        rows_of = (step.order % heads).argsort(stable=True).view(heads, -1)
        query_start_loc = step.query_start_loc[::heads] // heads
        for head, rows in enumerate(rows_of):
            head_queries = queries.index_select(0, rows)
            out = torch.empty_like(head_queries, dtype=result.dtype)
            self.attend_pages(
                layer,
                head_queries,
                *head_pages(kv_cache),
                out,
                query_start_loc,
                step.lengths[index, head::heads].contiguous(),
                step.table[head::heads],
                step.max_query_len,
                step.max_seq_len,
                metadata.num_splits,
                sinks[head],
            )
            result.index_copy_(0, rows, out)

    def _sinks(self) -> torch.Tensor | None:
        """Return the attention sinks [KV heads, G] float32; None if the layer has none."""
        if self.sinks is None:
            return None
        return self.sinks.float().view(self.num_kv_heads, -1)


def head_pages(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a cache [num_blocks, H, block_size, 2 * D] as pages of keys and values.

    The stride of the dimension of size 1 is that of one head, as TMA requires.

    Returns:
        Keys and values, [num_blocks * H, block_size, 1, D] each.

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

"""Attention over a latent cache (MLA) on the CPU: vLLM's kernels, over store and tail.

A layer has one cached head, so the kept tokens fill the same blocks of the store in all layers of a
group. An evicted request therefore runs as a shorter request with another block table.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from vllm_kvevict.attention.binding import GroupBinding, Observation
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.ops.torch.observe import observe
from vllm_kvevict.ops.torch.pages import head_page_table


@dataclass
class EvictingLatentMetadata(MLACommonMetadata):
    """vLLM's metadata over stores and tails, with the queries to record."""

    binding: GroupBinding | None = None
    observation: Observation | None = None


class EvictingLatentBackend(CPUMLABackend):
    """Registered as ``CPU_MLA``, the only name that ``platforms/cpu.py`` accepts."""

    @staticmethod
    def get_impl_cls() -> type["EvictingLatentImpl"]:
        return EvictingLatentImpl

    @staticmethod
    def get_builder_cls() -> type["EvictingLatentBuilder"]:
        return EvictingLatentBuilder


class EvictingLatentBuilder(MLACommonMetadataBuilder[EvictingLatentMetadata]):
    """Builds metadata over stores and tails; the worker sets ``binding`` for groups that evict."""

    binding: GroupBinding | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"metadata_cls": EvictingLatentMetadata})

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> EvictingLatentMetadata:
        common = common_attn_metadata
        rows = self.binding.rows(common) if self.binding is not None else None
        if self.binding is None or rows is None:
            return super().build(common_prefix_len, common, fast_build)
        held = over_stores(common, self.binding.state, rows)
        metadata = super().build(common_prefix_len, held, fast_build)
        metadata.binding = self.binding
        metadata.observation = self.binding.observation(common)
        return metadata


class EvictingLatentImpl(CPUMLAImpl):
    """vLLM's attention, with recording of the queries of observation windows."""

    layer: Any = None
    """The attention layer of this implementation, set by the worker."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention of the first sequences of a batch, which have one query each.

        Args:
            q: [T, query heads, 576] in the latent space, or its two parts.
            kv_c_and_k_pe_cache: [num_blocks, block_size, 576].
            attn_metadata: The metadata of :class:`EvictingLatentBuilder`.
            layer: The attention layer.

        Returns:
            [T, query heads, 512] and None.

        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        if (seen := _observed(attn_metadata, 0, len(query))) is not None:
            self._record(attn_metadata, query[seen[0]], seen[1])
        return super().forward_mqa(query, kv_c_and_k_pe_cache, attn_metadata, layer)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compute attention of the other sequences of a batch: prompts and prompt chunks.

        Args:
            q: [T, query heads, nope + rope].
            kv_c_normed: [T, 512], already in the cache.
            k_pe: [T, 1, 64], already in the cache.
            kv_c_and_k_pe_cache: [num_blocks, block_size, 576].
            attn_metadata: The metadata of :class:`EvictingLatentBuilder`.
            k_scale: Key scale of an FP8 cache.
            output: [T, query heads * V], written in place.
            output_scale: Not supported by the CPU kernel.

        """
        first = attn_metadata.num_decode_tokens
        if (seen := _observed(attn_metadata, first, len(q))) is not None:
            self._record(attn_metadata, self._absorbed(q[seen[0]]), seen[1])
        cached = kv_c_normed, k_pe, kv_c_and_k_pe_cache
        super().forward_mha(q, *cached, attn_metadata, k_scale, output, output_scale)

    def _absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries [K, query heads, 576] in the latent space, from [K, query heads, D]."""
        nope, pe = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent = torch.bmm(nope.transpose(0, 1), self.layer.W_UK_T).transpose(0, 1)
        return torch.cat([latent, pe], dim=-1)

    def _record(
        self, metadata: EvictingLatentMetadata, query: torch.Tensor, entries: torch.Tensor
    ) -> None:
        assert metadata.binding is not None
        rings = metadata.binding.rings(self.layer.layer_name)
        observe(rings, query, torch.arange(len(query)), entries)


def over_stores(
    common: CommonAttentionMetadata, state: GroupState, rows: torch.Tensor
) -> CommonAttentionMetadata:
    """Return a batch in which evicted requests have the lengths and blocks of store and tail.

    Args:
        common: vLLM's metadata. New tokens are written to the slots of its slot mapping.
        state: The group's state, with one KV head.
        rows: [R] int64 state rows in batch order.

    """
    if not state.evicted[rows].any():
        return common
    table, lengths = head_page_table(
        state.splits(rows)[:1],
        state.store[rows],
        state.tail_start[rows],
        common.seq_lens,
        common.block_table_tensor,
        state.rule.block_size,
        state.rule.page_tokens,
    )
    return common.replace(
        block_table_tensor=table[0], seq_lens=lengths[0], seq_lens_cpu_upper_bound=lengths[0]
    )


def _observed(
    metadata: MLACommonMetadata, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the recorded tokens among ``count`` from ``first`` on, and their ring entries."""
    observation = getattr(metadata, "observation", None)
    if observation is None:
        return None
    tokens, entries = observation
    inside = (tokens >= first) & (tokens < first + count)
    return (tokens[inside] - first, entries[inside]) if inside.any() else None

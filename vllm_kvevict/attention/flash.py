"""The CUDA attention backend: FlashAttention, run per KV head for evicted requests."""

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_kvevict.attention.gpu_backend import EvictingBackendMixin, EvictingImplMixin
from vllm_kvevict.attention.gpu_step import EvictingBuilderMixin
from vllm_kvevict.attention.scratch import MAX_SPLITS
from vllm_kvevict.ops.fp8 import typed


class EvictingFlashBackend(EvictingBackendMixin, FlashAttentionBackend):
    """Registered as ``FLASH_ATTN``."""

    @staticmethod
    def get_impl_cls() -> type["EvictingFlashImpl"]:
        return EvictingFlashImpl

    @staticmethod
    def get_builder_cls() -> type["EvictingFlashMetadataBuilder"]:
        return EvictingFlashMetadataBuilder


class EvictingFlashMetadataBuilder(EvictingBuilderMixin, FlashAttentionMetadataBuilder):
    """Builds metadata in which only requests that are not evicted have an ahead-of-time schedule.

    Per-head sequences have different lengths in every layer, so FlashAttention 3 schedules them in
    the kernel.
    """

    def num_splits(self, common: CommonAttentionMetadata) -> int:
        """Return the splits that vLLM allows in graphs, bounded by the memory of partial sums."""
        assert self.buffers is not None
        max_splits = self.max_num_splits or MAX_SPLITS
        return self.buffers.scratch.flash_splits(common.num_actual_tokens, max_splits)


class EvictingFlashImpl(EvictingImplMixin, FlashAttentionImpl):
    """FlashAttention; evicted requests run as one sequence per (request, KV head)."""

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
        shape = (len(lengths), 1)
        attended = flash_attn.flash_attn_varlen_func(
            q=query,
            k=typed(keys),
            v=typed(values),
            out=out,
            cu_seqlens_q=query_start_loc,
            max_seqlen_q=max_query_len,
            seqused_k=lengths,
            max_seqlen_k=max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            window_size=[-1, -1],
            block_table=table,
            softcap=self.logits_soft_cap,
            fa_version=self.vllm_flash_attn_version,
            num_splits=num_splits if self.vllm_flash_attn_version == 3 else 0,
            q_descale=layer._q_scale.expand(shape) if self.supports_quant_query_input else None,
            k_descale=layer._k_scale.expand(shape),
            v_descale=layer._v_scale.expand(shape),
            return_softmax_lse=sinks is not None,
        )
        if sinks is not None:
            # The kernel takes one sink per query head, but sequences belong to different KV heads.
            out.mul_((attended[1].T - sinks).sigmoid()[..., None])

"""The attention backend for GPUs and dtypes without FlashAttention: vLLM's Triton attention."""

from typing import Any

import torch
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_kvevict.attention.gpu_backend import EvictingBackendMixin, EvictingImplMixin
from vllm_kvevict.attention.gpu_step import EvictingBuilderMixin
from vllm_kvevict.ops.fp8 import FP8, typed


class EvictingTritonBackend(EvictingBackendMixin, TritonAttentionBackend):
    """Registered as ``TRITON_ATTN``."""

    @staticmethod
    def get_impl_cls() -> type["EvictingTritonImpl"]:
        return EvictingTritonImpl

    @staticmethod
    def get_builder_cls() -> type["EvictingTritonMetadataBuilder"]:
        return EvictingTritonMetadataBuilder


class EvictingTritonMetadataBuilder(EvictingBuilderMixin, TritonAttentionMetadataBuilder):
    """Builds metadata in which decode steps run our kernel, and other steps vLLM's."""


class EvictingTritonImpl(EvictingImplMixin, TritonAttentionImpl):
    """vLLM's Triton attention, also for evicted requests with several query tokens."""

    serves_all_sinks = False

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
        triton_attn.unified_attention(
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
            window_size=(-1, -1),
            block_table=table,
            softcap=self.logits_soft_cap,
            q_descale=layer._q_scale if query.dtype == FP8 else None,
            k_descale=layer._k_scale.expand(len(lengths), 1),
            v_descale=layer._v_scale.expand(len(lengths), 1),
            kv_quant_mode=self._kv_quant_mode,
            sinks=sinks,
        )

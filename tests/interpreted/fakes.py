"""Builders and implementations of our GPU backends without an engine around them.

On a CPU plain PyTorch stands in for FlashAttention and for the CUTLASS kernel of xformers' op.
"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn

from tests.e2e.paged import flash_attn_varlen_func
from tests.efficient import efficient_attention_forward
from tests.ragged import Ragged
from vllm_kvevict.attention.flash import EvictingFlashImpl, EvictingFlashMetadataBuilder
from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.scratch import Scratch, Shape
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.rules.rule import EvictionRule

WINDOW, SLOTS, LONGEST = 4, 3, 1024


def state_of(batch: Ragged) -> GroupState:
    """The batch's evictions, entered as the worker enters them; stale splits stay behind."""
    rows = batch.tail_start.shape[0]
    names = [f"layer.{index}" for index in range(batch.num_layers)]
    rule = EvictionRule(
        batch.block_size,
        WINDOW,
        0,
        budget_tokens=WINDOW + batch.block_size,
        page_tokens=batch.page_tokens,
    )
    device = batch.cache.device
    state = GroupState(0, names, rule, batch.num_heads, rows, LONGEST, device)
    state.head_indptr[..., 1:] = batch.head_indptr[..., 1:]
    for row in range(rows):
        if tail := int(batch.tail_start[row]):
            pages = batch.head_indptr[:, row].diff(dim=-1).long()
            state.record(row, tail, batch.stores[row], pages)
    return state


class Backend:
    """Builder, implementation and caches over one group's state.

    Args:
        kernel: Of evicted requests.
        batch: The requests.
        group: Query heads of a KV head.
        max_requests: Of a batch.
        dtype: What the model computes in; the cache's where it is not FP8.
        scales: Of queries, keys and values of an FP8 cache, None for a cache of ``dtype``.
        sinks: [query heads] attention sinks, None for none.

    """

    def __init__(
        self,
        kernel: Any,
        batch: Ragged,
        group: int,
        max_requests: int,
        dtype: torch.dtype | None = None,
        scales: tuple[float, float, float] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.dtype, self.scales = dtype or batch.cache.dtype, scales or (1.0, 1.0, 1.0)
        version, device = 2, batch.cache.device
        if device.type == "cpu":
            flash_attn.flash_attn_varlen_func = flash_attn_varlen_func
            if kernel == "xformers":
                from xformers.ops.fmha import cutlass

                cutlass.FwOp.OPERATOR = efficient_attention_forward
        else:
            version = flash_attn.get_flash_attn_version()
        self.state = state_of(batch)
        dim = batch.cache.shape[3] // 2
        shape = Shape(
            batch.num_heads,
            group,
            dim,
            batch.block_size,
            max_requests,
            LONGEST,
            batch.cache.dtype.itemsize,
        )
        self.builder = EvictingFlashMetadataBuilder.__new__(EvictingFlashMetadataBuilder)
        scratch = Scratch(kernel, shape, device, batch.stored)
        self.builder.buffers = GroupBuffers(self.state, scratch, device)
        self.builder.use_full_cuda_graph, self.builder.max_cudagraph_size = False, None
        self.builder.aot_schedule, self.builder.aot_sliding_window = False, (-1, -1)
        self.builder.rswa_window = self.builder.mm_prefix_query_ranges_np = None
        self.builder.dcp_world_size, self.builder.max_num_splits = 1, 0
        rings = (batch.num_layers, SLOTS * WINDOW, batch.num_heads * group, dim)
        self.rings = torch.zeros(rings, dtype=self.dtype, device=device)
        self.step: dict[str, Any] = dict(rows=None, slots=None)
        self.builder.binding = SimpleNamespace(
            rows=lambda common: self.step["rows"],
            ring_slots=lambda common: self.step["slots"],
            scores=lambda name: True,
            rings=lambda name: self.rings[self.state.layer_index[name]],
            records=True,
            extensions=[],
            extension_requests=lambda common: (),
            cache=lambda name: SimpleNamespace(centres=batch.centres),
        )
        self.impl = EvictingFlashImpl.__new__(EvictingFlashImpl)
        for name, value in dict(
            num_heads=batch.num_heads * group,
            num_kv_heads=batch.num_heads,
            num_queries_per_kv=group,
            head_size=dim,
            scale=dim**-0.5,
            logits_soft_cap=0.0,
            attn_type="decoder",
            alibi_slopes=None,
            sliding_window=(-1, -1),
            kv_cache_dtype="auto" if scales is None else "fp8",
            vllm_flash_attn_version=version,
            fa4_hd256=False,
            dcp_world_size=1,
            supports_quant_query_input=scales is not None,
            sinks=sinks,
        ).items():
            setattr(self.impl, name, value)

    def forward(
        self, layer: int, query: torch.Tensor, cache: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        module = SimpleNamespace(layer_name=f"layer.{layer}")
        for name, scale in zip("qkv", self.scales, strict=True):
            setattr(module, f"_{name}_scale", torch.full((), scale, device=query.device))
            setattr(module, f"_{name}_scale_float", scale)
        out = torch.full_like(query, float("nan"), dtype=self.dtype)
        return self.impl.forward(module, query, query, query, cache, metadata, out)


def common_of(batch: Ragged, counts: list[int], longest: int = LONGEST) -> CommonAttentionMetadata:
    """vLLM's metadata of the batch with ``counts`` query tokens per request."""
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(batch.cache.device),
        query_start_loc_cpu=starts,
        seq_lens=batch.seq_lens,
        num_reqs=len(counts),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(counts),
        max_seq_len=longest,
        block_table_tensor=batch.block_table,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64, device=batch.cache.device),
    )

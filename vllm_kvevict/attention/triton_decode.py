"""Decode attention by the Triton kernel, over the buffers of a group."""

import torch

from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.sequences import Decode
from vllm_kvevict.ops.fp8 import typed
from vllm_kvevict.ops.triton.decode import Ring, decode_attention


def decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    step: Decode,
    buffers: GroupBuffers,
    layer: int,
    scale: float,
    softcap: float,
    value_scale: float,
    sinks: torch.Tensor | None,
    ring: Ring | None,
    centres: torch.Tensor | None,
) -> None:
    """Compute attention of a step's single query tokens, in one layer, from the eviction state.

    Args:
        query: [T, query heads, D].
        kv_cache: [num_blocks, H, block_size, 2 * D]; uint8 holds FP8.
        output: [T, query heads, D], written at the requests' tokens.
        step: The requests and the plan of their slices.
        buffers: The group's buffers.
        layer: Index of the layer in its group.
        scale: Factor of query-key products, scales of an FP8 cache's keys and queries included.
        softcap: Logit soft cap, 0 for none.
        value_scale: Scale of an FP8 cache's values, else 1.
        sinks: [query heads] float32 attention sinks, None for none.
        ring: Ring entries to which the queries are written as well; None for none.
        centres: [H, D] float32 of stores in few bits; None for other stores.

    """
    assert step.slices is not None
    decode_attention(
        query,
        typed(kv_cache),
        output,
        buffers.state.stores,
        step.block_table,
        step.slices,
        layer,
        buffers.scratch.partials,
        scale,
        softcap,
        step.stages,
        value_scale,
        sinks,
        ring,
        buffers.scratch.packed,
        centres,
    )

"""Decode attention through the Triton kernel, over a group's buffers."""

import torch

from vllm_kvevict.attention.ragged import Decode, GroupBuffers
from vllm_kvevict.ops.triton.decode import decode_attention


def decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    plan: Decode,
    buffers: GroupBuffers,
    layer: int,
    scale: float,
    softcap: float,
) -> None:
    """Attention of a step's single query tokens, one layer, straight from the eviction state.

    Args:
        query: [T, query heads, D].
        kv_cache: [num_blocks, H, block_size, 2 * D].
        output: [T, query heads, D], written at the requests' tokens.
        plan: The requests; their lengths and splits are in ``buffers``.
        buffers: The group's buffers.
        layer: Index of the layer in its group.
        scale: Factor on query-key products.
        softcap: 0 for none.

    """
    state, scratch = buffers.state, buffers.scratch
    decode_attention(
        query,
        kv_cache,
        output,
        plan.rows,
        plan.places,
        plan.tokens,
        state.tail_start,
        state.stores,
        state.head_indptr[layer],
        plan.block_table,
        buffers.lengths[layer],
        buffers.size[layer : layer + 1],
        buffers.starts[layer],
        buffers.owners[layer],
        scratch.partial,
        scratch.weights,
        scale,
        softcap,
        scratch.programs,
    )

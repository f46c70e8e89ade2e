"""Evicted requests with several query tokens over stores in few bits, which are unpacked."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.scratch import DENSE_BYTES
from vllm_kvevict.attention.sequences import Extend
from vllm_kvevict.ops.triton.unpack import unpack_tokens
from vllm_kvevict.rules.rule import blocks_for


def unpacked(
    kv_cache: torch.Tensor, step: Extend, buffers: GroupBuffers, layer: int
) -> Iterator[tuple[Extend, torch.Tensor]]:
    """Yield some requests of a step at a time, over pages that hold their tokens.

    Args:
        kv_cache: [num_blocks, H, block_size, 2 * D].
        step: The requests.
        buffers: The group's buffers.
        layer: Index of the layer in its group.

    Yields:
        The requests, with tables of their pages, and these pages [pages, 1, block_size, 2 * D]:
        as many requests as :data:`.DENSE_BYTES` hold, at least one.

    """
    state, packed = buffers.state, buffers.scratch.packed
    assert packed is not None
    heads, block_size, content = kv_cache.shape[1:]
    pages = blocks_for(step.longest, block_size)
    one = heads * pages * block_size * content * kv_cache.itemsize
    at_once, count = max(1, DENSE_BYTES // one), len(step.rows)
    for first in range(0, count, at_once):
        last = min(first + at_once, count)
        sequences = slice(first * heads, last * heads)
        begin, end = step.starts[sequences.start], step.starts[sequences.stop]
        dense = kv_cache.new_empty((last - first) * heads, pages * block_size, content)
        lengths = step.lengths[:, sequences]
        unpack_tokens(
            step.rows[first:last],
            step.places[first:last],
            state.tail_start,
            state.stores,
            state.head_indptr[layer],
            step.block_table,
            lengths[layer],
            kv_cache,
            packed,
            dense,
        )
        table = torch.arange(len(dense) * pages, dtype=torch.int32, device=dense.device)
        part = replace(
            step,
            order=step.order[begin:end],
            lengths=lengths,
            query_start_loc=step.query_start_loc[sequences.start : sequences.stop + 1] - begin,
            table=table.view(len(dense), pages),
        )
        yield part, dense.view(-1, 1, block_size, content)

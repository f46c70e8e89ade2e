"""Evicted requests with several query tokens over stores in few bits, which are unpacked."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from vllm_kvevict.attention.gpu_buffers import LINE, GroupBuffers
from vllm_kvevict.attention.scratch import DENSE_BYTES
from vllm_kvevict.attention.sequences import Extend
from vllm_kvevict.ops.triton.unpack import unpack_tokens
from vllm_kvevict.rules.rule import blocks_for


def unpacked(
    kv_cache: torch.Tensor,
    centres: torch.Tensor,
    step: Extend,
    buffers: GroupBuffers,
    layer: int,
) -> Iterator[tuple[Extend, torch.Tensor]]:
    """Yield some requests of a step at a time, over pages that hold their tokens.

    Args:
        kv_cache: [num_blocks, H, block_size, 2 * D].
        centres: [H, D] float32, without which keys are stored.
        step: The requests.
        buffers: The group's buffers.
        layer: Index of the layer in its group.

    Yields:
        The requests, with tables of their pages, and these pages [pages, 1, block_size, 2 * D]:
        as many requests as :data:`.DENSE_BYTES` hold, at least one. The pages are valid until the
        next ones are yielded, which take the same memory.

    """
    state, packed = buffers.state, buffers.scratch.packed
    assert packed is not None
    heads, block_size, content = kv_cache.shape[1:]
    pages = blocks_for(step.longest, block_size)
    one = heads * pages * block_size * content * kv_cache.itemsize
    count = len(step.rows)
    at_once = min(max(1, DENSE_BYTES // one), count)
    room = kv_cache.new_empty(at_once * heads, pages * block_size, content)
    # Rows of the table are padded and lengths are copied, to align strides and addresses.
    first_page = torch.arange(len(room), dtype=torch.int32, device=room.device) * pages
    page = torch.arange(blocks_for(pages, LINE) * LINE, dtype=torch.int32, device=room.device)
    table = (first_page[:, None] + page)[:, :pages]
    for first in range(0, count, at_once):
        last = min(first + at_once, count)
        sequences = slice(first * heads, last * heads)
        begin, end = step.starts[sequences.start], step.starts[sequences.stop]
        dense = room[: (last - first) * heads]
        lengths = step.lengths[layer, sequences].clone()
        unpack_tokens(
            step.rows[first:last],
            step.places[first:last],
            state.tail_start,
            state.stores,
            state.head_indptr[layer],
            step.block_table,
            lengths,
            kv_cache,
            packed,
            centres,
            dense,
        )
        part = replace(
            step,
            order=step.order[begin:end],
            lengths=lengths.expand(len(step.lengths), -1),
            query_start_loc=step.query_start_loc[sequences.start : sequences.stop + 1] - begin,
            table=table[: len(dense)],
        )
        yield part, dense.view(-1, 1, block_size, content)

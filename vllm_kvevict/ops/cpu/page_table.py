"""The page table of attention on a CPU, in numpy: its operations take less time than torch's to
start, and a step lays out every KV-cache group anew."""

import numpy as np
import torch


def head_page_table(
    head_indptr: torch.Tensor,
    store: torch.Tensor,
    tail_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    page_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what :func:`vllm_kvevict.ops.torch.pages.head_page_table` returns, of tensors on the
    CPU."""
    indptr, blocks, rows = head_indptr.numpy(), store.numpy(), block_table.numpy()
    (num_layers, num_requests, num_heads), starts = indptr.shape, tail_start.numpy()
    num_heads -= 1
    first, pages = indptr[..., :-1, None], np.diff(indptr)[..., None]
    tail_tokens = seq_lens.numpy() - starts
    tail_blocks = -(-tail_tokens // block_size)
    longest = int(tail_blocks.max())
    heads, tail = np.arange(num_heads), np.arange(longest)

    # The pages that a head of a request may have: all of the store, its own of the tail, and none.
    flat = blocks.shape[1] * num_heads
    known = np.zeros((num_requests, num_heads, flat + longest + 1), np.int32)
    in_store = blocks[..., None] * num_heads + heads
    known[:, :, :flat] = in_store.reshape(num_requests, 1, flat)
    place = (starts // block_size)[:, None] + tail
    place = np.where(tail < tail_blocks[:, None], place, 0)
    in_tail = np.take_along_axis(rows, place, 1) * num_heads
    known[:, :, flat : flat + longest] = in_tail[:, None] + heads[:, None]

    column = np.arange(int((pages[..., 0] + tail_blocks[:, None]).max()))
    after = column - pages
    index = np.where(after < tail_blocks[:, None, None], flat + after, flat + longest)
    index = np.where(after < 0, first + column, index)
    table = np.take_along_axis(known[None], index, 3)
    lengths = pages[..., 0] * page_tokens + tail_tokens[:, None]
    shape = (num_layers, num_requests * num_heads)
    return (
        torch.from_numpy(table.reshape(*shape, len(column))),
        torch.from_numpy(lengths.reshape(shape).astype(np.int32)),
    )

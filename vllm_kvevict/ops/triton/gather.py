"""Gathering of head pages into contiguous memory, for kernels without page tables. Triton."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_PROGRAMS = 64


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["table", "lengths"])
def _gather_kernel(
    cache,
    table,
    lengths,
    dense,
    table_row,
    dense_row,
    PAGE: tl.constexpr,
    CONTENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    count = (tl.load(lengths + sequence) + PAGE - 1) // PAGE
    for column in range(tl.program_id(1), count, PROGRAMS):
        page = tl.load(table + sequence * table_row + column).to(tl.int64)
        source = cache + page * CONTENT
        target = dense + sequence * dense_row + column * CONTENT
        for base in range(0, CONTENT, BLOCK):
            offset = base + tl.arange(0, BLOCK)
            mask = offset < CONTENT
            tl.store(target + offset, tl.load(source + offset, mask=mask), mask=mask)


def gather_pages(
    cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, dense: torch.Tensor
) -> None:
    """Copy the pages of N sequences, up to the length of each.

    Args:
        cache: [pages, block_size, 2 * D], contiguous.
        table: [N, >= V] int32 head pages.
        lengths: [N] int32 cached tokens, at most V * block_size each.
        dense: [N, V, block_size, 2 * D] in the cache's dtype, contiguous, written in place.

    """
    sequences, columns, page, content = dense.shape
    programs = min(columns, _PROGRAMS)
    _gather_kernel[(sequences, programs)](
        cache,
        table,
        lengths,
        dense,
        table.stride(0),
        dense.stride(0),
        PAGE=page,
        CONTENT=page * content,
        PROGRAMS=programs,
        BLOCK=min(_BLOCK, triton.next_power_of_2(page * content)),
    )

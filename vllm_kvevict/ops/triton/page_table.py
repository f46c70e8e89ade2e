"""Page table of one layer, written on the device at a fixed address. Triton."""

import torch
import triton
import triton.language as tl

from vllm_kvevict.ops.triton.decode import Ring

_BLOCK = 128

_PROGRAMS = 4096
"""Programs of a launch, unless there are more sequences: about twice what an H100 runs at once."""


@triton.jit(
    do_not_specialize=["stores_row", "block_row", "table_row"],
    do_not_specialize_on_alignment=[
        *("rows", "places", "head_indptr", "block_table", "lengths", "table"),
        *("slots", "seq_lens"),
    ],
)
def _page_table_kernel(
    rows,
    places,
    tail_start,
    stores,
    head_indptr,
    block_table,
    lengths,
    table,
    query,
    rings,
    slots,
    seq_lens,
    stores_row,
    block_row,
    table_row,
    query_token,
    query_head,
    window,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    QUERY: tl.constexpr,
    RECORD: tl.constexpr,
):
    sequence = tl.program_id(0)
    request = sequence // HEADS
    head = sequence % HEADS
    row = tl.load(rows + request).to(tl.int64)
    place = tl.load(places + request).to(tl.int64)
    tail = tl.load(tail_start + row, mask=row >= 0, other=0)
    indptr = head_indptr + row * (HEADS + 1) + head
    first = tl.load(indptr, mask=tail > 0, other=0)
    pages = tl.load(indptr + 1, mask=tail > 0, other=0) - first
    length = tl.load(lengths + sequence)
    stored = pages * STORED
    after = pages + (length - stored + PAGE - 1) // PAGE
    count = tl.where(length >= stored, after, (length + STORED - 1) // STORED)
    if RECORD:
        slot = tl.load(slots + request)
        if (slot >= 0) & (tl.program_id(1) == 0):
            element = tl.arange(0, QUERY)
            own = element < GROUP * DIM
            own_head = head * GROUP + element // DIM
            at = request.to(tl.int64) * query_token + own_head * query_head + element % DIM
            value = tl.load(query + at, mask=own, other=0.0)
            entry = slot.to(tl.int64) * window + (tl.load(seq_lens + place) - 1) % window
            target = (entry * HEADS + head) * (GROUP * DIM) + element
            tl.store(rings + target, value.to(rings.dtype.element_ty), mask=own)
    # Programs of one sequence take its columns in turn.
    for base in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        column = base + tl.arange(0, BLOCK)
        used = column < count
        in_store = column < pages
        flat = first + column
        kept = tl.load(stores + row * stores_row + flat // HEADS, mask=used & in_store, other=0)
        tail_block = tail // PAGE + column - pages
        later = tl.load(
            block_table + place * block_row + tail_block, mask=used & (column >= pages), other=0
        )
        page = tl.where(in_store, kept * HEADS + flat % HEADS, later * HEADS + head)
        tl.store(table + sequence.to(tl.int64) * table_row + column, page, mask=used)


def write_page_table(
    rows: torch.Tensor,
    places: torch.Tensor,
    tail_start: torch.Tensor,
    stores: torch.Tensor,
    head_indptr: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    block_size: int,
    page_tokens: int,
    query: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> None:
    """Write the physical head pages of every (request, KV head): store pages, then tail pages.

    In decode steps the launch also records queries, which saves one launch for each layer. The
    number of programs depends on R, H and V only, so that a graph serves every length.

    Args:
        rows: [R] int32 state rows, -1 for none.
        places: [R] int32 batch indices.
        tail_start: [rows] int32.
        stores: [rows, S] int32 store blocks.
        head_indptr: [rows, H + 1] int32 of this layer, contiguous.
        block_table: [batch, W] int32 positional blocks.
        lengths: [>= R * H] int32 of this layer.
        table: [>= R * H, V] int32, written up to the length of each sequence.
        block_size: Tokens in a page of the tail.
        page_tokens: Tokens in a page of the store.
        query: [>= R, H * G, D], dimensions contiguous: the single query of each request, in order;
            read only if there is a ring.
        ring: Ring entries to which the queries are written; None for none.

    """
    heads = head_indptr.shape[1] - 1
    sequences = rows.shape[0] * heads
    group = dim = 1
    if ring is not None:
        assert query is not None
        group, dim = query.shape[1] // heads, query.shape[2]
    _page_table_kernel[(sequences, _programs(sequences, table.shape[1]))](
        rows,
        places,
        tail_start,
        stores,
        head_indptr,
        block_table,
        lengths,
        table,
        # Addresses of slices are aligned or not, for which Triton would compile two kernels.
        tail_start if query is None or ring is None else query,
        tail_start if ring is None else ring.entries,
        rows if ring is None else ring.slots,
        rows if ring is None else ring.seq_lens,
        stores.stride(0),
        block_table.stride(0),
        table.stride(0),
        1 if query is None or ring is None else query.stride(0),
        1 if query is None or ring is None else query.stride(1),
        1 if ring is None else ring.window,
        HEADS=heads,
        PAGE=block_size,
        STORED=page_tokens,
        BLOCK=_BLOCK,
        GROUP=group,
        DIM=dim,
        QUERY=triton.next_power_of_2(group * dim),
        RECORD=ring is not None,
    )


def _programs(sequences: int, width: int) -> int:
    """Return the number of programs of each sequence of at most ``width`` pages."""
    return max(1, min(triton.cdiv(width, _BLOCK), _PROGRAMS // max(1, sequences)))

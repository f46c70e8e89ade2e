"""Lengths of (request, KV head) sequences, and their keys cut into splits of equal size. Triton.

A launch of decode attention has as many programs as the GPU runs at once, and heads differ in
length. All keys of a layer are therefore cut into splits of one size, the smallest for which
they fit into the buffers, and the splits are numbered through: sequence s has splits
``starts[s] .. starts[s + 1] - 1``. Everything stays on the device, at fixed addresses.
"""

import torch
import triton
import triton.language as tl

TILE = 64
"""Keys that one program reads at a time; a split is a multiple of it."""

_BLOCK = 256


@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["rows", "places", "seq_lens", "lengths"],
)
def _lengths_kernel(
    rows,
    places,
    seq_lens,
    tail_start,
    head_indptr,
    lengths,
    num_sequences,
    page_tokens,
    indptr_layer,
    lengths_layer,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(0)
    sequence = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = sequence < num_sequences
    request = sequence // HEADS
    head = sequence % HEADS
    row = tl.load(rows + request, mask=used, other=-1)
    place = tl.load(places + request, mask=used, other=0)
    length = tl.load(seq_lens + place, mask=used, other=0)
    tail = tl.load(tail_start + row, mask=row >= 0, other=0)
    split = head_indptr + layer * indptr_layer + row.to(tl.int64) * (HEADS + 1) + head
    first = tl.load(split, mask=tail > 0, other=0)
    last = tl.load(split + 1, mask=tail > 0, other=0)
    length = length - tail + (last - first) * page_tokens
    tl.store(lengths + layer * lengths_layer + sequence, tl.maximum(length, 0), mask=used)


@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["lengths", "size", "starts"],
)
def _starts_kernel(
    lengths,
    size,
    starts,
    num_sequences,
    lengths_layer,
    starts_layer,
    TARGET: tl.constexpr,
    SMALLEST: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for base in range(0, num_sequences, BLOCK):
        sequence = base + offset
        mask = sequence < num_sequences
        total += tl.load(lengths + layer * lengths_layer + sequence, mask=mask, other=0)
    keys = tl.sum(total, 0)
    split = (keys + TARGET - 1) // TARGET
    split = tl.maximum((split + TILE - 1) // TILE * TILE, SMALLEST).to(tl.int32)
    tl.store(size + layer, split)
    before = keys.to(tl.int32) * 0
    tl.store(starts + layer * starts_layer, before)
    for base in range(0, num_sequences, BLOCK):
        sequence = base + offset
        mask = sequence < num_sequences
        length = tl.load(lengths + layer * lengths_layer + sequence, mask=mask, other=0)
        count = (length + split - 1) // split
        end = before + tl.cumsum(count, 0)
        tl.store(starts + layer * starts_layer + sequence + 1, end, mask=mask)
        before += tl.sum(count, 0)


@triton.jit(do_not_specialize_on_alignment=["starts", "owners"])
def _owners_kernel(starts, owners, starts_layer, owners_layer, BLOCK: tl.constexpr):
    layer = tl.program_id(0)
    sequence = tl.program_id(1)
    first = tl.load(starts + layer * starts_layer + sequence)
    last = tl.load(starts + layer * starts_layer + sequence + 1)
    for base in range(first, last, BLOCK):
        index = base + tl.arange(0, BLOCK)
        value = tl.zeros([BLOCK], tl.int32) + sequence
        tl.store(owners + layer * owners_layer + index, value, mask=index < last)


def head_lengths(
    rows: torch.Tensor,
    places: torch.Tensor,
    seq_lens: torch.Tensor,
    tail_start: torch.Tensor,
    head_indptr: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
) -> None:
    """Cached tokens of every (request, KV head), for all layers in one launch.

    Args:
        rows: [R] int32 state row of each request, -1 for one that has none (never evicted).
        places: [R] int32 place of each request in the batch.
        seq_lens: [batch] int32 logical lengths; 0 for padding.
        tail_start: [rows] int32; 0 for a request that is not evicted.
        head_indptr: [L, rows, H + 1] int32, read only where the tail start is above 0.
        lengths: [L, >= R * H] int32, written.
        block_size: Tokens in a page.

    """
    num_layers, _, heads = head_indptr.shape
    num_sequences = rows.shape[0] * (heads - 1)
    _lengths_kernel[(num_layers, triton.cdiv(num_sequences, _BLOCK))](
        rows,
        places,
        seq_lens,
        tail_start,
        head_indptr,
        lengths,
        num_sequences,
        block_size,
        head_indptr.stride(0),
        lengths.stride(0),
        HEADS=heads - 1,
        BLOCK=_BLOCK,
    )


def split_keys(
    lengths: torch.Tensor,
    num_sequences: int,
    target: int,
    smallest: int,
    size: torch.Tensor,
    starts: torch.Tensor,
    owners: torch.Tensor,
) -> None:
    """Cut the keys of every layer into splits of one size.

    There are at most ``target + num_sequences`` splits in a layer.

    Args:
        lengths: [L, >= num_sequences] int32.
        num_sequences: R * H.
        target: Splits that are aimed at: enough to fill the GPU.
        smallest: Fewest keys in a split, a multiple of :data:`TILE`.
        size: [L] int32, written: keys in a split.
        starts: [L, > num_sequences] int32, written: first split of each sequence, then the total.
        owners: [L, >= target + num_sequences] int32, written: the sequence of each split.

    Raises:
        ValueError: ``smallest`` is no multiple of the tile, or ``owners`` is too small.

    """
    if smallest % TILE:
        raise ValueError(f"the smallest split must be a multiple of {TILE} keys, not {smallest}")
    if owners.shape[1] < target + num_sequences:
        raise ValueError(
            f"{owners.shape[1]} entries cannot hold {target} splits of {num_sequences} sequences"
        )
    _starts_kernel[(lengths.shape[0],)](
        lengths,
        size,
        starts,
        num_sequences,
        lengths.stride(0),
        starts.stride(0),
        TARGET=target,
        SMALLEST=smallest,
        TILE=TILE,
        BLOCK=_BLOCK,
    )
    _owners_kernel[(lengths.shape[0], num_sequences)](
        starts, owners, starts.stride(0), owners.stride(0), BLOCK=32
    )

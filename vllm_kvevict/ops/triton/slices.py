"""Lengths of (request, KV head) sequences, and the slices of decode attention. Triton.

A launch of decode attention has as many programs as the GPU runs at once, and heads differ in
length. Therefore the keys of all sequences of a layer stand in one row, which is cut into slices of
equal length, one for each program. This is the Stream-K decomposition (Osama et al., 2023), as in
LeanAttention (Sanovar et al., 2024). Before its keys each sequence has room for the keys that could
be read while a program begins with it, so that programs with many short sequences end with the
others. A slice begins in the middle of one sequence at most, and ends in the middle of one at most,
so a program has at most two partial results. One launch plans all layers of a step, on the device,
at fixed addresses.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 64
"""Keys that one program reads at a time."""

STEP = 16
"""Keys of the smallest page. The length of a slice is a multiple of it."""

WORDS = 12
"""Numbers in a descriptor: 48 bytes."""

# Their order in a descriptor.
ROW, PLACE, TOKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FIRST_PAGE, STORED, TAIL_BLOCK = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
BEGIN, END, OWNER = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
PIECES, SEQUENCE, MORE = tl.constexpr(9), tl.constexpr(10), tl.constexpr(11)

_BLOCK = 256
_WIDE_BLOCK = 1024


@dataclass(frozen=True)
class Slices:
    """The slices of L layers for P programs and at most N sequences, as descriptors of pieces.

    A piece is the part of a sequence in a slice. ``pieces[l, p]`` describes the first piece of
    program p, and ``pieces[l, P + s]`` the first piece of sequence s. A program reads the first of
    these, then those of the sequences that follow, so it knows each address before it needs it.
    The numbers of a descriptor are:

    - the state row of the request (-1 for none), its batch index, and its token;
    - the first page of the head in the stores, the number of keys in them, and the block of the
      positional table at which the tail begins;
    - the first key of the piece in its sequence, and the key after its last;
    - the program that has the first piece of the sequence, and the number of its pieces;
    - the sequence, -1 for a program without keys; 1 if the next sequence is in the slice as well.

    Args:
        pieces: [L, P + N, WORDS] int32.
        programs: P.

    """

    pieces: torch.Tensor
    programs: int

    @classmethod
    def room(cls, layers: int, sequences: int, programs: int, device: torch.device) -> "Slices":
        """Allocate the descriptors of so many programs and at most so many sequences."""
        shape = (layers, programs + sequences, WORDS)
        return cls(torch.zeros(shape, dtype=torch.int32, device=device), programs)

    @property
    def num_bytes(self) -> int:
        return self.pieces.numel() * self.pieces.element_size()


@triton.jit
def _cached(
    rows, places, seq_lens, tail_start, indptr, sequence, used, page_tokens, HEADS: tl.constexpr
):
    """Return row, place, tail start, first store page, stored keys, and length of sequences."""
    request = sequence // HEADS
    row = tl.load(rows + request, mask=used, other=-1)
    place = tl.load(places + request, mask=used, other=0)
    length = tl.load(seq_lens + place, mask=used, other=0)
    tail = tl.load(tail_start + row, mask=row >= 0, other=0)
    own = indptr + row.to(tl.int64) * (HEADS + 1) + sequence % HEADS
    first = tl.load(own, mask=tail > 0, other=0)
    stored = (tl.load(own + 1, mask=tail > 0, other=0) - first) * page_tokens
    return row, place, tail, first, stored, tl.maximum(length - tail + stored, 0)


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
    indptr = head_indptr + layer * indptr_layer
    _, _, _, _, _, length = _cached(
        rows, places, seq_lens, tail_start, indptr, sequence, used, page_tokens, HEADS
    )
    tl.store(lengths + layer * lengths_layer + sequence, length, mask=used)


@triton.jit
def _occupied(length, used, BEFORE: tl.constexpr, STEP: tl.constexpr):
    """Return the part of the row that sequences occupy, so that pieces begin with whole pages."""
    whole = BEFORE + tl.maximum((length + STEP - 1) // STEP * STEP, STEP)
    return tl.where(used, whole, 0).to(tl.int64)


@triton.jit
def _describe(
    at, mask, row, place, token, first_page, stored, tail_block, begin, end, owner, pieces,
    sequence, more,
):  # fmt: skip
    tl.store(at + ROW, row, mask=mask)
    tl.store(at + PLACE, place, mask=mask)
    tl.store(at + TOKEN, token, mask=mask)
    tl.store(at + FIRST_PAGE, first_page, mask=mask)
    tl.store(at + STORED, stored, mask=mask)
    tl.store(at + TAIL_BLOCK, tail_block, mask=mask)
    tl.store(at + BEGIN, begin.to(tl.int32), mask=mask)
    tl.store(at + END, end.to(tl.int32), mask=mask)
    tl.store(at + OWNER, owner.to(tl.int32), mask=mask)
    tl.store(at + PIECES, pieces.to(tl.int32), mask=mask)
    tl.store(at + SEQUENCE, sequence, mask=mask)
    tl.store(at + MORE, more.to(tl.int32), mask=mask)


@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["rows", "places", "tokens", "seq_lens"],
)
def _plan_kernel(
    rows,
    places,
    tokens,
    seq_lens,
    tail_start,
    head_indptr,
    pieces,
    num_sequences,
    programs,
    page_tokens,
    indptr_layer,
    pieces_layer,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    SMALLEST: tl.constexpr,
    BEFORE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    layer = tl.program_id(0)
    begin_of_block = tl.program_id(1) * BLOCK
    indptr = head_indptr + layer * indptr_layer
    descriptors = pieces + layer * pieces_layer
    # Each program adds up the whole row, which is cheaper than a second launch.
    total = tl.zeros([WIDE], tl.int64)
    before = tl.zeros([WIDE], tl.int64)
    for base in range(0, num_sequences, WIDE):
        sequence = base + tl.arange(0, WIDE)
        used = sequence < num_sequences
        _, _, _, _, _, length = _cached(
            rows, places, seq_lens, tail_start, indptr, sequence, used, page_tokens, HEADS
        )
        occupied = _occupied(length, used, BEFORE, STEP)
        total += occupied
        before += tl.where(sequence < begin_of_block, occupied, 0)
    keys = tl.sum(total, 0)
    size = ((keys + programs - 1) // programs + STEP - 1) // STEP * STEP
    # No slice lies before the keys of a sequence as a whole, so each has a piece.
    size = tl.maximum(size, SMALLEST if SMALLEST > BEFORE else BEFORE + STEP)

    sequence = begin_of_block + tl.arange(0, BLOCK)
    used = sequence < num_sequences
    row, place, tail, first, stored, length = _cached(
        rows, places, seq_lens, tail_start, indptr, sequence, used, page_tokens, HEADS
    )
    token = tl.load(tokens + sequence // HEADS, mask=used, other=0)
    tail_block = tail // PAGE
    occupied = _occupied(length, used, BEFORE, STEP)
    end = tl.sum(before, 0) + tl.cumsum(occupied, 0)
    start = end - occupied
    first_key = start + BEFORE
    owner = first_key // size
    last = (end - 1) // size
    count = tl.where(used, last - owner + 1, 0)
    more = ((end + BEFORE) // size == last) & (sequence + 1 < num_sequences)
    until = tl.minimum(length, (owner + 1) * size - first_key)
    _describe(
        descriptors + (programs + sequence) * WORDS, used, row, place, token, first, stored,
        tail_block, sequence * 0, until, owner, count, sequence, more & (count == 1),
    )  # fmt: skip
    for piece in range(tl.max(count, 0).to(tl.int32)):
        program = owner + piece
        begin = tl.maximum(program * size - first_key, 0)
        until = tl.minimum(length, (program + 1) * size - first_key)
        # Not if the slice begins with another sequence.
        is_first = (piece < count) & (program * size >= start)
        _describe(
            descriptors + program * WORDS, is_first, row, place, token, first, stored, tail_block,
            begin, until, owner, count, sequence, more & (piece == count - 1),
        )  # fmt: skip
    if begin_of_block == 0:
        occupied_programs = ((keys + size - 1) // size).to(tl.int32)
        for base in range(occupied_programs, programs, WIDE):
            program = base + tl.arange(0, WIDE)
            idle = program < programs
            tl.store(descriptors + program * WORDS + SEQUENCE, -1, mask=idle)
            tl.store(descriptors + program * WORDS + MORE, 0, mask=idle)


def head_lengths(
    rows: torch.Tensor,
    places: torch.Tensor,
    seq_lens: torch.Tensor,
    tail_start: torch.Tensor,
    head_indptr: torch.Tensor,
    lengths: torch.Tensor,
    page_tokens: int,
) -> None:
    """Compute the cached tokens of every (request, KV head), for all layers in one launch.

    Args:
        rows: [R] int32 state row of each request, -1 for requests without one (never evicted).
        places: [R] int32 batch index of each request.
        seq_lens: [batch] int32 logical lengths; 0 for padding.
        tail_start: [rows] int32; 0 for a request that is not evicted.
        head_indptr: [L, rows, H + 1] int32, read only if the tail start is above 0.
        lengths: [L, >= R * H] int32, written.
        page_tokens: Tokens in a page of a store.

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
        page_tokens,
        head_indptr.stride(0),
        lengths.stride(0),
        HEADS=heads - 1,
        BLOCK=_BLOCK,
    )


def plan_slices(
    rows: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    tail_start: torch.Tensor,
    head_indptr: torch.Tensor,
    slices: Slices,
    block_size: int,
    page_tokens: int,
    smallest: int,
    before: int,
) -> None:
    """Cut the keys of every layer into equal slices, one for each program, in one launch.

    The lengths are those of :func:`head_lengths`. A sequence occupies ``before`` and its length in
    the row, rounded up to a multiple of :data:`STEP`. The length of a slice is the smallest
    multiple of it for which the slices of all programs hold the row.

    Args:
        rows: [R] int32 state rows, -1 for none.
        places: [R] int32 batch indices.
        tokens: [R] int32 index of each request's token in the batch.
        seq_lens: [batch] int32 logical lengths; 0 for padding.
        tail_start: [rows] int32; 0 for a request that is not evicted.
        head_indptr: [L, rows, H + 1] int32, read only if the tail start is above 0.
        slices: Plan to write.
        block_size: Tokens in a block of the tail.
        page_tokens: Tokens in a page of a store.
        smallest: Minimum length of a slice, a multiple of :data:`STEP`. It is more than ``before``
            in any case.
        before: Keys that could be read while a program begins with a sequence, a multiple of
            :data:`STEP`.

    Raises:
        ValueError: A number of keys is not a multiple of :data:`STEP`, or there are more sequences
            than the plan has room for.

    """
    num_layers, _, heads = head_indptr.shape
    num_sequences = rows.shape[0] * (heads - 1)
    if smallest % STEP or before % STEP:
        raise ValueError(f"slices are multiples of {STEP} keys, not {smallest} and {before}")
    if slices.pieces.shape[1] < slices.programs + num_sequences:
        raise ValueError(
            f"{slices.pieces.shape[1]} descriptors do not suffice for {slices.programs} programs "
            f"and {num_sequences} sequences"
        )
    _plan_kernel[(num_layers, triton.cdiv(num_sequences, _BLOCK))](
        rows,
        places,
        tokens,
        seq_lens,
        tail_start,
        head_indptr,
        slices.pieces,
        num_sequences,
        slices.programs,
        page_tokens,
        head_indptr.stride(0),
        slices.pieces.stride(0),
        HEADS=heads - 1,
        PAGE=block_size,
        WORDS=WORDS,
        SMALLEST=smallest,
        BEFORE=before,
        STEP=STEP,
        BLOCK=_BLOCK,
        WIDE=_WIDE_BLOCK,
    )

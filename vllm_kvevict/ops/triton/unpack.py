"""Unpacking of stores in few bits for kernels that read pages of plain tokens. Triton."""

import torch
import triton
import triton.language as tl

from vllm_kvevict.ops.triton.packed import (
    PackedStores,
    appended,
    levels,
    load_columns,
    load_scales,
    load_words,
    middle,
    num_fields,
    ones,
    rotation_rows,
    unit,
)
from vllm_kvevict.ops.triton.slices import TILE

_PROGRAMS = 32


@triton.jit
def _rotated_back(
    page, scales, one, token, used, matrices, FIRST_SCALE: tl.constexpr,
    START: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, SPREAD: tl.constexpr,
    TYPE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Return keys or values [TILE, DIM_PAD] float32, without the scale of the rotation.

    Args:
        page: The plane of their bytes, as int32.
        scales: The plane of scales, as int32.
        one: See :func:`~.packed.levels`.
        token: [TILE] tokens of the page.
        used: [TILE] bool; False gives 0.
        matrices: By group, even and odd dimensions: rows [SPREAD // 2, DIM_PAD] of the rotation.
        FIRST_SCALE: Index of the scale of their first group.
        START: First bit of a level in its byte.
        BITS: Bits of a level.

    """
    found = tl.zeros([token.shape[0], DIM_PAD], tl.float32)
    for group in tl.static_range(GROUPS):
        words = load_words(page, token, used, group, SPREAD, DIM)
        own_scales = load_scales(scales, token, used, FIRST_SCALE + group, GROUPS)[:, None]
        for odd in tl.static_range(2):
            centred = tl.zeros([token.shape[0], SPREAD // 2], tl.float32)
            for field in tl.static_range(num_fields(BITS, TYPE)):
                numbers = levels(words, one, odd, START, BITS, field, TYPE).to(tl.float32)
                numbers = numbers - middle(START, BITS, field, TYPE)
                centred += numbers * unit(START, BITS, field, TYPE)
            elements = (centred * own_scales).to(TYPE)
            found = tl.dot(elements, matrices[2 * group + odd], found, input_precision="ieee")
    return found


@triton.jit(
    do_not_specialize=["stores_row", "block_row", "dense_row"],
    do_not_specialize_on_alignment=["rows", "places", "head_indptr", "block_table", "lengths"],
)
def _unpack_kernel(
    rows,
    places,
    tail_start,
    stores,
    head_indptr,
    block_table,
    lengths,
    cache,
    words,
    rotation,
    centres,
    dense,
    one,
    factor,
    stores_row,
    block_row,
    dense_row,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    STORE_PAGE: tl.constexpr,
    STORE_TILES: tl.constexpr,
    STORE_LANES: tl.constexpr,
    STORE_BYTES: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    JOINT: tl.constexpr = KEY_BITS + VALUE_BITS <= 8
    KEY_START: tl.constexpr = VALUE_BITS if JOINT else 0
    PLANE: tl.constexpr = STORE_PAGE * DIM // 4
    SPAN: tl.constexpr = STORE_PAGE // STORE_TILES
    TYPE: tl.constexpr = dense.dtype.element_ty
    sequence = tl.program_id(0)
    head = sequence % HEADS
    row = tl.load(rows + sequence // HEADS).to(tl.int64)
    place = tl.load(places + sequence // HEADS).to(tl.int64)
    tail = tl.load(tail_start + row, mask=row >= 0, other=0)
    indptr = head_indptr + row * (HEADS + 1) + head
    first = tl.load(indptr, mask=tail > 0, other=0)
    pages = tl.load(indptr + 1, mask=tail > 0, other=0) - first
    length = tl.load(lengths + sequence)
    stored = tl.minimum(pages * STORE_PAGE, length)
    target = dense + sequence.to(tl.int64) * dense_row
    dim = tl.arange(0, DIM_PAD)
    in_head = (dim < DIM)[None, :]
    if stored > 0:
        signs = load_columns(rotation, DIM, DIM_PAD)
        centre = tl.load(centres + head * DIM + dim, mask=dim < DIM, other=0.0)
        matrices = ()
        for part in tl.static_range(2 * GROUPS):
            matrix = rotation_rows(signs, part // 2, part % 2, TYPE, SPREAD, DIM)
            matrices = appended(matrices, matrix)
        lane = tl.arange(0, STORE_LANES)
        for tile in range(tl.program_id(1), (stored + SPAN - 1) // SPAN, tl.num_programs(1)):
            key = tile * SPAN + lane
            used = (lane < SPAN) & (key < stored)
            flat = first + tile // STORE_TILES
            block = tl.load(stores + row * stores_row + flat // HEADS)
            physical = block.to(tl.int64) * HEADS + flat % HEADS
            page = words + physical * (STORE_BYTES // 4)
            scales = page + (PLANE if JOINT else 2 * PLANE)
            token = tile % STORE_TILES * SPAN + lane
            keys = _rotated_back(
                page, scales, one, token, used, matrices, 0, KEY_START, KEY_BITS, GROUPS,
                SPREAD, TYPE, DIM, DIM_PAD,
            )  # fmt: skip
            values = _rotated_back(
                page + (0 if JOINT else PLANE), scales, one, token, used, matrices, GROUPS,
                0, VALUE_BITS, GROUPS, SPREAD, TYPE, DIM, DIM_PAD,
            )  # fmt: skip
            at = target + key[:, None] * (2 * DIM) + dim[None, :]
            mask = used[:, None] & in_head
            tl.store(at, (keys * factor + centre[None, :]).to(TYPE), mask=mask)
            tl.store(at + DIM, (values * factor).to(TYPE), mask=mask)
    later = length - stored
    # Attention reads whole pages, and a weight of 0 times what is no number is no number.
    whole = (length + PAGE - 1) // PAGE * PAGE - stored
    own_table = block_table + place * block_row + tail // PAGE
    for base in range(tl.program_id(1) * TILE, whole, tl.num_programs(1) * TILE):
        token = base + tl.arange(0, TILE)
        used = token < later
        block = tl.load(own_table + token // PAGE, mask=used, other=0)
        slot = (block.to(tl.int64) * HEADS + head) * PAGE + token % PAGE
        source = cache + slot[:, None] * (2 * DIM) + dim[None, :]
        at = target + (stored + token)[:, None] * (2 * DIM) + dim[None, :]
        mask, written = used[:, None] & in_head, (token < whole)[:, None] & in_head
        tl.store(at, tl.load(source, mask=mask, other=0.0), mask=written)
        tl.store(at + DIM, tl.load(source + DIM, mask=mask, other=0.0), mask=written)


def unpack_tokens(
    rows: torch.Tensor,
    places: torch.Tensor,
    tail_start: torch.Tensor,
    stores: torch.Tensor,
    head_indptr: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    cache: torch.Tensor,
    packed: PackedStores,
    centres: torch.Tensor,
    dense: torch.Tensor,
) -> None:
    """Write the tokens of every (request, KV head) to contiguous memory, in the cache's type.

    Args:
        rows: [R] int32 state rows, -1 for none.
        places: [R] int32 batch indices.
        tail_start: [rows] int32.
        stores: [rows, S] int32 store blocks.
        head_indptr: [rows, H + 1] int32 of this layer, contiguous.
        block_table: [batch, W] int32 positional blocks.
        lengths: [R * H] int32 of this layer, at most N each.
        cache: [num_blocks, H, block_size, 2 * D] contiguous.
        packed: The stores.
        centres: [H, D] float32, without which their keys are stored, contiguous.
        dense: [R * H, N, 2 * D] in the cache's type, contiguous, written up to the end of the last
            page of each sequence. Zeros fill the rest of that page.

    """
    heads, page, dim = cache.shape[1], cache.shape[2], cache.shape[3] // 2
    tiles = triton.cdiv(dense.shape[1], TILE)
    _unpack_kernel[(len(dense), max(1, min(_PROGRAMS, tiles)))](
        rows,
        places,
        tail_start,
        stores,
        head_indptr,
        block_table,
        lengths,
        cache,
        cache.view(torch.int32),
        packed.rotation,
        centres,
        dense,
        ones(cache.dtype),
        packed.scale,
        stores.stride(0),
        block_table.stride(0),
        dense.stride(0),
        HEADS=heads,
        PAGE=page,
        DIM=dim,
        DIM_PAD=max(16, triton.next_power_of_2(dim)),
        TILE=TILE,
        STORE_BYTES=cache[0, 0].nbytes,
        **packed.constants(dim),
    )

"""Reading packed stores in decode attention. Triton.

Logits and weighted sums over a store are computed in the basis in which its tokens are rotated: the
query is rotated before, and the sums are rotated back after, once for each piece of a sequence. See
:class:`~vllm_kvevict.ops.token_format.PackedFormat`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_kvevict.ops.token_format import PackedFormat, groups, hadamard

LANES = 64
"""Maximum number of tokens in a tile of a store."""


@dataclass(frozen=True)
class PackedStores:
    """What a launch knows about the stores of a layer.

    Args:
        rotation: [D, D] int8: the rotation of stored tokens, with elements 1, -1 and 0.
        scale: The factor that makes it orthogonal.
        token_format: The format.
        page_tokens: Tokens in a page of a store.

    """

    rotation: torch.Tensor
    scale: float
    token_format: PackedFormat
    page_tokens: int

    @classmethod
    def of(
        cls, token_format: PackedFormat, head_size: int, block_size: int, device: torch.device
    ) -> "PackedStores":
        """Return the stores of pages that hold ``block_size`` other tokens."""
        # On the CPU first: ``device`` may be ``meta``, on which nothing is computed.
        matrix = hadamard(head_size, torch.device("cpu"))
        rotation = matrix.sign().to(torch.int8).to(device)
        return cls(
            rotation,
            (head_size & -head_size) ** -0.5,
            token_format,
            token_format.page_tokens(block_size),
        )

    def constants(self, head_size: int) -> dict[str, int]:
        """Return the compile-time arguments of a kernel."""
        tiles = triton.cdiv(self.page_tokens, LANES)
        while self.page_tokens % tiles:
            tiles += 1
        return dict(
            STORE_PAGE=self.page_tokens,
            STORE_TILES=tiles,
            STORE_LANES=triton.next_power_of_2(self.page_tokens // tiles),
            KEY_BITS=self.token_format.key_bits,
            VALUE_BITS=self.token_format.value_bits,
            GROUPS=groups(head_size),
        )


NOT_PACKED = dict(STORE_PAGE=1, STORE_TILES=1, STORE_LANES=1, KEY_BITS=0, VALUE_BITS=0, GROUPS=1)
"""The compile-time arguments of a kernel that reads stores as all other pages."""


@triton.jit
def load_rotation(rotation, TRANSPOSED: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Return the rotation [DIM_PAD, DIM_PAD] int8, or its transpose; 0 outside of [DIM, DIM]."""
    row = tl.arange(0, DIM_PAD)[:, None]
    column = tl.arange(0, DIM_PAD)[None, :]
    at = column * DIM + row if TRANSPOSED else row * DIM + column
    return tl.load(rotation + at, mask=(row < DIM) & (column < DIM), other=0)


@triton.jit
def rotate_query(q, rotation, factor, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Return queries [GROUP_PAD, DIM_PAD] in the basis of stored tokens, in their type."""
    matrix = load_rotation(rotation, True, DIM, DIM_PAD).to(q.dtype)
    return (tl.dot(q, matrix, input_precision="ieee") * factor).to(q.dtype)


@triton.jit
def rotate_sums_back(
    sums, weight, rotation, factor, TYPE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr
):
    """Return weighted sums [GROUP_PAD, DIM_PAD] float32 of stored values in the model's basis.

    In 16 bits, three parts of each sum are multiplied by tensor cores. The products are exact,
    because the elements of the rotation are 1 and -1.

    Args:
        sums: [GROUP_PAD, DIM_PAD] float32.
        weight: [GROUP_PAD] float32 sums of the weights, by which the largest part stays in range.
        rotation: See :class:`PackedStores`.
        factor: Its scale.
        TYPE: Type of the products.

    """
    matrix = load_rotation(rotation, False, DIM, DIM_PAD).to(TYPE)
    if tl.float32 == TYPE:
        return tl.dot(sums, matrix, input_precision="ieee") * factor
    whole = tl.where(weight > 0, weight, 1.0)[:, None]
    mean = sums / whole
    high = mean.to(TYPE)
    rest = mean - high.to(tl.float32)
    middle = rest.to(TYPE)
    low = (rest - middle.to(tl.float32)).to(TYPE)
    back = tl.dot(low, matrix)
    back += tl.dot(middle, matrix)
    back += tl.dot(high, matrix)
    return back * (whole * factor)


@triton.jit
def _unpacked(
    codes, scales, read, dim, SHIFT: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr
):
    """Return elements [TILE, DIM_PAD] float32.

    GPUs convert integers at a quarter of the rate or less. A level is therefore put into the
    fraction of a power of two: the float32 with these bits is the power and the level.

    Args:
        codes: [TILE, DIM_PAD] int32 with the levels from bit ``SHIFT`` on, at least 1.
        scales: [TILE] addresses of the scales of the first group.
        read: [TILE] bool; elements are 0 where it is False.
        dim: [DIM_PAD] dimensions.

    """
    POWER: tl.constexpr = 23 - SHIFT
    bits = (codes & (((1 << BITS) - 1) << SHIFT)) | ((POWER + 127) << 23)
    centred = bits.to(tl.float32, bitcast=True) - ((1 << POWER) + ((1 << BITS) - 1) / 2)
    scale = tl.load(scales, mask=read, other=0.0).to(tl.float32)[:, None]
    if GROUPS > 1:
        for group in tl.static_range(1, GROUPS):
            other = tl.load(scales + group, mask=read, other=0.0).to(tl.float32)[:, None]
            scale = tl.where(dim[None, :] >= group * 64, other, scale)
    return centred * scale


@triton.jit
def load_stored_tile(
    codes, scales, physical, token, used, dim, PAGE_BYTES: tl.constexpr, DIM: tl.constexpr,
    STORE_PAGE: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Return keys and values [TILE, DIM_PAD] float32 of tokens of one page, rotated.

    Args:
        codes: The cache as uint8.
        scales: The cache as float16.
        physical: int64 page.
        token: [TILE] tokens of the page.
        used: [TILE] bool; False gives 0.
        dim: [DIM_PAD] dimensions.

    """
    JOINT: tl.constexpr = KEY_BITS + VALUE_BITS <= 8
    PLANES: tl.constexpr = 1 if JOINT else 2
    page = codes + physical * PAGE_BYTES
    at = token[:, None] * DIM + dim[None, :]
    read = used[:, None] & (dim < DIM)[None, :]
    keys = tl.load(page + at, mask=read, other=0).to(tl.int32) << 1
    values = keys
    if not JOINT:
        values = tl.load(page + STORE_PAGE * DIM + at, mask=read, other=0).to(tl.int32) << 1
    KEY_SHIFT: tl.constexpr = VALUE_BITS + 1 if JOINT else 1
    own = scales + physical * (PAGE_BYTES // 2) + PLANES * STORE_PAGE * DIM // 2
    own = own + token * (2 * GROUPS)
    return (
        _unpacked(keys, own, used, dim, KEY_SHIFT, KEY_BITS, GROUPS),
        _unpacked(values, own + GROUPS, used, dim, 1, VALUE_BITS, GROUPS),
    )

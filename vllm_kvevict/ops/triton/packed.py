"""Reading packed stores in decode attention. Triton.

Logits and weighted sums over a store are computed in the basis in which its tokens are rotated: the
query is rotated before, and the sums are rotated back after, once for each piece of a sequence. See
:class:`~vllm_kvevict.ops.token_format.PackedFormat`.

Elements are not converted, centred or scaled one by one. The bits of a level are put into the
fraction of a 16-bit float between 1 and 2, which is one operation for two elements:
:func:`levels`. Who multiplies these numbers multiplies the products by the scales, and subtracts
:func:`middle` times the sum of the other factor.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_kvevict.ops.token_format import GROUP, PackedFormat, groups, signs

LANES = 64
"""Maximum number of tokens in a tile of a store."""

NEGATIVE = tl.constexpr(512)
"""Bit of a column of the rotation with a negative sign. Ten bits make a sign; the others are those
of an index of a dimension."""

PARITIES = tl.constexpr(0x69969669)
"""The bit 31 - n is 1 if n has an odd number of bits."""


def _spread(head_size: int) -> int:
    """Return the dimensions of a tile of a group. Products need at least 16 for its half."""
    if head_size % GROUP == 0:
        return GROUP
    return max(32, triton.next_power_of_2(head_size))


@dataclass(frozen=True)
class PackedStores:
    """What a launch knows about the stores of a layer.

    Args:
        rotation: [D] int32: the columns of the rotation of stored tokens, each as its index, and
            ``NEGATIVE`` if its random sign is negative.
        scale: The factor that makes the signs of the rotation orthogonal.
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
        return cls(
            _columns(head_size).to(device),
            (head_size & -head_size) ** -0.5,
            token_format,
            token_format.page_tokens(block_size),
        )

    def reset(self) -> None:
        """Write the rotation again, whatever the memory holds."""
        self.rotation.copy_(_columns(len(self.rotation)))

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
            SPREAD=_spread(head_size),
        )


def _columns(head_size: int) -> torch.Tensor:
    """Return :attr:`PackedStores.rotation` on the host."""
    # A device may be ``meta``, on which nothing is computed.
    negative = (signs(head_size) < 0) * NEGATIVE.value
    return torch.arange(head_size, dtype=torch.int32, device="cpu") | negative.int()


NOT_PACKED = dict(STORE_PAGE=1, STORE_TILES=1, STORE_LANES=1, KEY_BITS=0, VALUE_BITS=0, GROUPS=1)
NOT_PACKED |= dict(SPREAD=1)
"""The compile-time arguments of a kernel that reads stores as all other pages."""


def ones(dtype: torch.dtype) -> int:
    """Return the bits of the number 1 in both halves of a word. In float32, as in float16."""
    return 0x3F803F80 if dtype == torch.bfloat16 else 0x3C003C00


@triton.constexpr_function
def _fraction(dtype):
    """Return the bits of the fraction of a type. In float32, levels are those of float16."""
    return 7 if dtype == tl.bfloat16 else 10


@triton.constexpr_function
def num_fields(bits, dtype):
    """Return in how many fields a level is read: two if the fraction does not hold its bits."""
    return 1 if bits <= _fraction(dtype) else 2


@triton.constexpr_function
def _first(start, field):
    """Return the first bit of a field in its byte."""
    return start + 4 * field


@triton.constexpr_function
def _size(bits, field, dtype):
    """Return the number of bits of a field."""
    if num_fields(bits, dtype) == 1:
        return bits
    return bits - 4 if field else 4


@triton.constexpr_function
def _place(start, bits, field, dtype):
    """Return the first bit of a field in the fraction.

    The highest bit of a byte becomes that of the fraction, so that all fields are moved by one
    shift. Seven bits hold the lower half of a byte as it is.
    """
    return max(0, _first(start, field) + _fraction(dtype) - 8)


@triton.constexpr_function
def unit(start, bits, field, dtype):
    """Return by how much a level is larger if the number of this field is larger by 1."""
    return 2 ** (4 * field + _fraction(dtype) - _place(start, bits, field, dtype))


@triton.constexpr_function
def middle(start, bits, field, dtype):
    """Return the number in the middle of the range of a field: 0 in float32, which has to be exact
    to more than what is left of sums of such numbers, and where it is subtracted from each."""
    return 0.0 if dtype == tl.float32 else _between(start, bits, field, dtype)


@triton.constexpr_function
def _between(start, bits, field, dtype):
    half_level = 2.0 ** (_place(start, bits, field, dtype) - _fraction(dtype) - 1)
    return 1 + (2 ** _size(bits, field, dtype) - 1) * half_level


@triton.jit
def appended(tensors, tensor):
    """Return a tuple with one more tensor."""
    return tensors + (tensor,)  # noqa: RUF005 (Triton knows no starred expressions.)


@triton.jit
def levels(
    words, one, odd: tl.constexpr, START: tl.constexpr, BITS: tl.constexpr, field: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Return numbers [TILE, 2 * W] of even or odd dimensions, between 1 and 2 in 16 bits.

    The level minus its middle is the sum over fields of ``unit`` times (number - ``middle``).

    Args:
        words: [TILE, W] int32 of four bytes each. The two halves of a word are two elements.
        one: The number 1 twice, as int32: :func:`ones`. It is no constant, because an instruction
            of an NVIDIA GPU has one, which is the mask.
        odd: 1 for odd dimensions, 0 for even ones.
        START: First bit of a level in its byte.
        BITS: Bits of a level.
        field: Less than :func:`num_fields`.
        TYPE: Type of the numbers.

    """
    PLACE: tl.constexpr = _place(START, BITS, field, TYPE)
    SHIFT: tl.constexpr = _first(START, field) + 8 * odd - PLACE
    MASK: tl.constexpr = ((1 << _size(BITS, field, TYPE)) - 1) << PLACE
    moved = words >> SHIFT if SHIFT >= 0 else words << -SHIFT
    both = moved & (MASK * 0x10001) | one
    pairs = tl.join(both.to(tl.int16), (both >> 16).to(tl.int16))
    # The maximum of one element. Triton lays out operands that come from a join as if they were
    # made of half as many bits, which takes 200 more instructions for a tile, and it does not look
    # beyond a reduction.
    bits = tl.max(pairs.reshape(words.shape[0], 2 * words.shape[1], 1), 2).to(tl.int16)
    if tl.float32 == TYPE:
        between: tl.constexpr = _between(START, BITS, field, TYPE)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) - between
    else:  # The compiler would compile what follows a return in a branch, for float32 too.
        return bits.to(TYPE, bitcast=True)


@triton.jit
def load_words(page, token, used, group, SPREAD: tl.constexpr, DIM: tl.constexpr):
    """Return the bytes of a group of dimensions, [TILE, SPREAD // 4] int32.

    Args:
        page: A plane of a page, as int32.
        token: [TILE] tokens of the page.
        used: [TILE] bool; the bytes of others are undefined.
        group: The group.
        SPREAD: Dimensions of a tile of a group; the bytes of those that do not exist are undefined.
        DIM: Dimensions of a head.

    """
    word = tl.arange(0, SPREAD // 4)
    at = token[:, None] * (DIM // 4) + (group * (SPREAD // 4) + word)[None, :]
    mask = used[:, None]
    if DIM % SPREAD != 0:
        mask = mask & (word < DIM // 4)[None, :]
    return tl.load(page + at, mask=mask)


@triton.jit
def load_scales(page, token, used, index: tl.constexpr, GROUPS: tl.constexpr):
    """Return scales [TILE] float32: those of keys by group, then those of values.

    Args:
        page: The plane of scales of a page, as int32, because a copy that runs ahead of its use
            takes four bytes or more.
        token: [TILE] tokens of the page.
        used: [TILE] bool; False gives 0.
        index: Index of the scale.
        GROUPS: Groups of dimensions.

    """
    pair = tl.load(page + token * GROUPS + index // 2, mask=used, other=0)
    half = pair >> (16 * (index % 2))
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_columns(rotation, DIM: tl.constexpr, DIM_PAD: tl.constexpr, CACHE: tl.constexpr = ""):
    """Return what :func:`rotation_rows` needs of all columns: [DIM_PAD] int32.

    Args:
        rotation: See :class:`PackedStores`.
        DIM: Dimensions of a head.
        DIM_PAD: Length of the result; 0 beyond DIM.
        CACHE: Cache modifier of the load.

    """
    column = tl.arange(0, DIM_PAD)
    return tl.load(rotation + column, mask=column < DIM, other=0, cache_modifier=CACHE)


@triton.jit
def rotation_rows(
    columns, group: tl.constexpr, odd: tl.constexpr, TYPE: tl.constexpr, SPREAD: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Return the rows of the rotation of even or odd dimensions of a group.

    They are computed, because a program would wait for each part of a matrix that it loads: the
    sign of an element is the parity of the bits that its row and its column have in common.

    Args:
        columns: [DIM_PAD] of :func:`load_columns`.
        group: The group.
        odd: 1 for odd dimensions, 0 for even ones.
        TYPE: Type of the result.
        SPREAD: Dimensions of a tile of a group.
        DIM: Dimensions of a head.

    Returns:
        [SPREAD // 2, DIM_PAD] of a type, with elements 1, -1 and 0; 0 outside of [DIM, DIM].

    """
    # Of one Hadamard matrix of the diagonal.
    SIZE: tl.constexpr = DIM & -DIM
    row = (group * SPREAD + 2 * tl.arange(0, SPREAD // 2) + odd)[:, None]
    common = (row % SIZE | NEGATIVE) & columns[None, :]
    common = common ^ (common >> 5)
    # The highest bit says whether the parity of five bits is odd.
    sign = PARITIES << (common & 31)
    if tl.float32 == TYPE:
        bits = sign & -0x80000000 | 0x3F800000
    elif tl.bfloat16 == TYPE:
        bits = ((sign >> 16) & -0x8000 | 0x3F80).to(tl.int16)
    else:
        bits = ((sign >> 16) & -0x8000 | 0x3C00).to(tl.int16)
    found = bits.to(TYPE, bitcast=True)
    if columns.shape[0] != SIZE or SPREAD > SIZE:
        column = tl.arange(0, columns.shape[0])[None, :]
        inside = (row // SIZE == column // SIZE) & (column < DIM)
        found = tl.where(inside, found, 0.0)
    return found

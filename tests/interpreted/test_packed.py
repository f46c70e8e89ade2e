"""How stores in few bits are read: numbers made of bits, and attention over them in 16 bits."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.triton_cases import check_decode
from vllm_kvevict.ops.token_format import INT4, INT8, hadamard
from vllm_kvevict.ops.triton.packed import (
    PackedStores,
    levels,
    load_columns,
    middle,
    num_fields,
    ones,
    rotation_rows,
    unit,
)

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@pytest.fixture
def products_of_bfloat16(monkeypatch):
    """The interpreter multiplies the bits of bfloat16 as integers."""
    original = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *others):
        return original(self, widened(a), widened(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@triton.jit
def _numbers_kernel(
    words, out, one, odd: tl.constexpr, START: tl.constexpr, BITS: tl.constexpr,
    field: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, TILE)[:, None]
    read = tl.load(words + row * WORDS + tl.arange(0, WORDS)[None, :])
    numbers = levels(read, one, odd, START, BITS, field, out.dtype.element_ty)
    tl.store(out + row * (2 * WORDS) + tl.arange(0, 2 * WORDS)[None, :], numbers)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("start", "bits"), [(4, 4), (0, 4), (3, 5), (0, 3), (0, 6), (0, 7), (0, 8)]
)
def test_levels_are_in_the_fractions_of_numbers(dtype, start, bits):
    """Every byte, at every place in a word."""
    each = torch.stack([torch.arange(256).roll(by) for by in range(4)], 1).to(torch.uint8)
    stored = each.reshape(64, 16)
    expected = (stored.long() >> start & (1 << bits) - 1).double() - ((1 << bits) - 1) / 2
    for odd in range(2):
        total = torch.zeros(64, 8, dtype=torch.float64)
        for field in range(num_fields(bits, TYPES[dtype])):
            of = (start, bits, field, TYPES[dtype])
            numbers = torch.full((64, 8), float("nan"), dtype=dtype)
            words = stored.view(torch.int32)
            _numbers_kernel[(1,)](words, numbers, ones(dtype), odd, start, bits, field, 64, 4)
            if dtype != torch.float32:
                assert bool(((numbers >= 1) & (numbers < 2)).all())
            total += unit(*of) * (numbers.double() - middle(*of))
        assert torch.equal(total, expected[:, odd::2])


@triton.jit
def _rotation_kernel(
    columns, out, GROUPS: tl.constexpr, SPREAD: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):  # fmt: skip
    signs = load_columns(columns, DIM, DIM_PAD)
    column = tl.arange(0, DIM_PAD)[None, :]
    for group in tl.static_range(GROUPS):
        for odd in tl.static_range(2):
            rows = rotation_rows(signs, group, odd, out.dtype.element_ty, SPREAD, DIM)
            row = (group * SPREAD + 2 * tl.arange(0, SPREAD // 2) + odd)[:, None]
            tl.store(out + row * DIM_PAD + column, rows)


@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 192, 256, 512])
def test_computed_rotation(size, dtype):
    """The rows that the kernels compute are the signs of the format's matrix, and 0 in padding."""
    packed = PackedStores.of(INT4, size, 16, torch.device("cpu"))
    constants = packed.constants(size)
    groups, spread = constants["GROUPS"], constants["SPREAD"]
    padded = triton.next_power_of_2(size)
    found = torch.full((groups * spread, padded), 5.0, dtype=dtype)
    _rotation_kernel[(1,)](
        packed.rotation, found, GROUPS=groups, SPREAD=spread, DIM=size, DIM_PAD=padded
    )
    expected = torch.zeros(found.shape, dtype=torch.float64)
    expected[:size, :size] = hadamard(size, torch.device("cpu")).sign()
    assert torch.equal(found.double(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("stored", "dim"), [(INT4, 128), (INT8, 64)], ids=["int4", "int8"])
def test_decode_in_16_bits(stored, dim, dtype, products_of_bfloat16):
    """Over many keys, where a part of the middle that is left would be as large as the result."""
    options = dict(stored=stored, dim=dim, store_blocks=9, requests=2, layers=1, longest_tail=20)
    check_decode("cpu", dtype, seed=1, evicted_share=1.0, **options)


def test_small_values_in_float16():
    """Weights times scales would be below the smallest number of float16."""
    options = dict(stored=INT4, dim=64, store_blocks=3, requests=2, layers=1, longest_tail=20)
    check_decode("cpu", torch.float16, seed=2, evicted_share=1.0, size=2.0**-14, **options)

"""What per-head attention may allocate for itself."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm_kvevict.attention import flash
from vllm_kvevict.attention.flash import EvictingFlashImpl
from vllm_kvevict.attention.scratch import DENSE_BYTES, PARTIAL_BYTES, Scratch, Shape
from vllm_kvevict.ops.token_format import INT4
from vllm_kvevict.ops.triton.residency import Residency

LLAMA = Shape(
    num_heads=8, group=4, head_size=128, block_size=16, max_requests=256, max_model_len=64
)


def test_partial_sums_of_flash_attention_are_bounded():
    scratch = Scratch("flash", LLAMA, torch.device("meta"))
    assert scratch.op_bytes == PARTIAL_BYTES
    # Decode graphs below 992 sequences keep all their splits.
    assert scratch.flash_splits(124) == 32 and scratch.flash_splits(124, 8) == 8
    for tokens in (1, 500, 3000, 6000, 10**6):
        splits = scratch.flash_splits(tokens)
        assert splits == 1 or splits * tokens * 8 * 4 * (128 + 1) * 4 <= PARTIAL_BYTES
    assert 1 < scratch.flash_splits(3000) < scratch.flash_splits(500) < 32


@pytest.mark.parametrize(("version", "splits"), [(2, 0), (3, 7), (4, 0)])
def test_only_version_3_is_told_how_many_splits(version, splits, monkeypatch):
    given = {}
    monkeypatch.setattr(
        flash.flash_attn,
        "flash_attn_varlen_func",
        lambda **call: given.update(call),
        raising=False,  # the CPU build has none
    )
    impl = EvictingFlashImpl.__new__(EvictingFlashImpl)
    impl.scale, impl.logits_soft_cap, impl.vllm_flash_attn_version = 1.0, 0.0, version
    impl.supports_quant_query_input = False
    layer = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
    pages = torch.zeros(1, 16, 1, 4)
    one = torch.zeros(1, dtype=torch.int32)
    impl.attend_pages(layer, pages, pages, pages, pages, one, one, one, 1, 16, 7, None)
    assert given["num_splits"] == splits


@pytest.mark.parametrize("kernel", ["flash", "triton"])
def test_stores_in_few_bits_are_read_by_the_triton_kernel(kernel):
    """Whatever the number of sequences; and there is room to unpack the longest request."""
    few, meta = replace(LLAMA, max_requests=1), torch.device("meta")
    plain, packed = Scratch(kernel, few, meta), Scratch(kernel, few, meta, INT4)
    assert packed.by_slices(1) and plain.by_slices(1) == (kernel == "triton")
    assert packed.op_bytes == plain.op_bytes + DENSE_BYTES
    longer = replace(few, max_model_len=65536)
    token = 2 * 2 * LLAMA.num_heads * LLAMA.head_size
    grown = Scratch(kernel, longer, meta, INT4).op_bytes - plain.op_bytes
    assert grown == 65536 * token > DENSE_BYTES


def test_stages_by_sequences():
    """The longer pipeline is for more sequences than programs."""
    scratch = Scratch("triton", LLAMA, torch.device("cpu"))
    scratch.resident = Residency(8, 3, 5)
    assert [scratch.stages(n) for n in (1, 8, 9, 2048)] == [3, 3, 5, 5]


def test_partial_sums_of_the_triton_kernel_do_not_depend_on_the_sequences():
    few, many = (
        Scratch("triton", replace(LLAMA, max_requests=n), torch.device("meta")) for n in (1, 999)
    )
    assert few.partials.num_bytes == many.partials.num_bytes
    assert few.partials.sums.shape == (2 * few.programs, 4, 128)

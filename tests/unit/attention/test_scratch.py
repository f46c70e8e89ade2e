"""What per-head attention may allocate for itself."""

from types import SimpleNamespace

import pytest
import torch

from vllm_kvevict.attention import flash
from vllm_kvevict.attention.flash import EvictingFlashImpl
from vllm_kvevict.attention.scratch import PARTIAL_BYTES, Scratch, Shape, splits_to_fill

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


def test_the_splits_that_fill_a_gpu_fit_the_buffers():
    """About one for each program, and two where it would have one to three whole sequences."""
    counts = [splits_to_fill(n, 264) for n in (1, 264, 265, 512, 726, 727, 8192)]
    assert counts == [249, 249, 528, 528, 528, 264, 264]
    for requests in (1, 3, 40):
        scratch = Scratch("triton", Shape(4, 2, 64, 16, requests, 256), torch.device("cpu"))
        for sequences in range(1, 4 * requests + 1):
            assert splits_to_fill(sequences, scratch.programs) + sequences <= scratch.max_splits

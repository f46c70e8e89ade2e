"""The attention benchmark before it meets a GPU: its calls and its file, at tiny sizes."""

import json
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch

from benchmarks.gpu import attention, calls, part
from benchmarks.gpu.heads import Step
from tests.e2e.paged import flash_attn_varlen_func
from tests.efficient import efficient_attention_forward
from vllm_kvevict.attention.scratch import Shape


@pytest.fixture
def step() -> Step:
    shape = Shape(
        num_heads=2, group=2, head_size=32, block_size=16, max_requests=3, max_model_len=512
    )
    made = Step(3, 48, 20, shape, torch.float32, torch.device("cpu"), layers=2)
    made.measure()
    made.run_triton()
    assert int((made.slices.pieces[1, :, 9] > 1).sum()) >= 2, "no sequence has several pieces"
    assert bool(made.out.abs().sum(-1).all())
    return made


@pytest.fixture
def served(monkeypatch):
    """FlashAttention 3 and xformers' op, in plain PyTorch."""
    from vllm.v1.attention.backends import fa_utils
    from xformers.ops.fmha import cutlass

    module = ModuleType("vllm.vllm_flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setattr(fa_utils, "get_scheduler_metadata", lambda **_: None, raising=False)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", module)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda: 3)
    monkeypatch.setattr(cutlass.FwOp, "OPERATOR", efficient_attention_forward)


@pytest.mark.parametrize("other", ["flash", "xformers"])
def test_kernels_that_are_compared_compute_the_same(other, step, served):
    """Of the last of two layers, whose heads and caches are others; both fill the rings."""
    assert not torch.equal(step.head_indptr[0], step.head_indptr[1])
    ours, rings = step.out.clone(), [ring.clone() for ring in step.rings]
    assert len(rings) == 2 and all(bool(ring.any()) for ring in rings)
    for tensor in (step.out, *step.rings):
        tensor.fill_(float("nan"))
    call = (
        calls.flash_per_head if other == "flash" else partial(calls.memory_efficient, paged=False)
    )
    call(step)()
    torch.testing.assert_close(step.out, ours, atol=2e-5, rtol=2e-5)
    for ring, expected in zip(step.rings, rings, strict=True):
        assert torch.equal(ring.nan_to_num(0.0), expected)


def test_flash_attention_with_equal_lengths(step, served):
    step.out.fill_(float("nan"))
    calls.flash_equal(step)()
    assert not step.out.isnan().any()


def test_layers_share_caches_where_memory_is_short(step):
    size = step.caches[0].nbytes
    for room, count in ((5 * size, 4), (3 * size, 3), (1, 1)):
        made = replace(step, layers=4, cache_bytes=room)
        assert len(made.caches) == len(made.rings) == count
        assert made.cache(3) is made.caches[3 % count]


def test_a_trial_writes_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(part, "provenance", lambda: dict(commit="c", versions={}, machine="m"))
    file = tmp_path / "attention.json"
    options = (
        "--device cpu --dtype float32 --batches 1,2 --budgets 32 --heads 2 --layers 2 "
        f"--group 2 --head-size 32 --max-model-len 512 --copy-bytes 65536 --output {file}"
    )
    monkeypatch.setattr(sys, "argv", ["attention", *options.split()])
    with pytest.raises(SystemExit) as ended:
        attention.main()
    assert ended.value.code is None
    rows = json.loads(file.read_text())["rows"]
    assert [row["requests"] for row in rows] == [2, 1]
    timed = {"triton", "plan of a step"}
    assert all(row[name]["median_ms"] > 0 for row in rows for name in timed)

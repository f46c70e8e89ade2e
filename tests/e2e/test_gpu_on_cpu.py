"""Proof 1 for the CUDA worker, on a CPU: tokens equal the oracle's, decode steps replayed.

Everything of the CUDA path runs, under either model runner, but FlashAttention's kernel
(``gpu_on_cpu.py``). Attention of decode steps is a list of calls that was captured once for a
padded number of requests, and is replayed while requests come, go and evict. That needs Triton's
interpreter, so a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import cached_tiny_llama

ROOT = Path(__file__).parents[2]


RUNNERS = {"0": "vllm.v1.worker.cpu_model_runner", "1": "vllm.v1.worker.cpu.model_runner"}
"""By ``VLLM_USE_V2_MODEL_RUNNER``; each derives from the GPU's."""

LAUNCHES = {
    "flash": ["_page_table_kernel", "flash_attn"],
    "triton": ["_attend_kernel"],
}


def ran(kernel, runner, script, *arguments):
    environment = dict(
        os.environ,
        TRITON_INTERPRET="1",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests" / "triton_cpu")]),
        KVEVICT_TEST_STOCK="FLASH_ATTN",
        KVEVICT_TEST_KERNEL=kernel,
        VLLM_USE_V2_MODEL_RUNNER=runner,
    )
    done = subprocess.run(
        [sys.executable, "-m", script, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


EVERY_NIGHT = (("flash", "1"), ("triton", "0"), ("triton", "1"))


@pytest.mark.parametrize(
    ("kernel", "runner"),
    [("flash", "0")] + [pytest.param(*each, marks=pytest.mark.nightly) for each in EVERY_NIGHT],
)
def test_tokens_equal_the_oracle(kernel, runner):
    # Interpreting takes its time for each layer.
    model = cached_tiny_llama(layers=2, kv_heads=2)
    result = ran(kernel, runner, "tests.e2e.gpu_script", str(model))
    assert result["runner"] == RUNNERS[runner]
    assert result["builder"] == "EvictingFlashMetadataBuilder"
    assert result["kernel"] == kernel
    # Four requests, three in the graph of four, two, and one in the graph of two.
    assert result["sizes"] == [[2, 4]] and result["launches"] == [LAUNCHES[kernel]]
    assert result["replays"] > 60 and result["padded"] > 30
    assert result["agreed"] == result["total"] == 80 + 40 + 20 + 20
    assert result["full_attention_agreed"] < result["total"]
    assert result["evictions_at_point"]
    assert result["evictions_on_worker"] == result["evictions"] >= 5
    assert result["evictions_decode"] >= 2
    assert result["blocks_leaked"] == 0


@pytest.mark.parametrize(
    ("kernel", "runner", "store_dtype"),
    [
        ("triton", "0", "auto"),
        pytest.param("flash", "1", "auto", marks=pytest.mark.nightly),
        pytest.param("triton", "1", "int8", marks=pytest.mark.nightly),
    ],
)
def test_policies_that_extend_attention_keep_what_the_cpu_keeps(kernel, runner, store_dtype):
    """h2o, ada-h2o and subgen-stream, with requests of other policies in the same batches."""
    model = cached_tiny_llama(layers=2, kv_heads=2, head_dim=64 if store_dtype == "int8" else 32)
    result = ran(kernel, runner, "tests.e2e.gpu_every_query_script", str(model), store_dtype)
    cpu, gpu = result["cpu"], result["gpu"]
    assert "Flash" in gpu.pop("builder") and "CPU" in cpu.pop("builder")
    assert result["same_tokens"] and result["same_positions"]
    assert cpu == gpu
    assert gpu["evictions_on_worker"] == gpu["evictions"] >= (6 if store_dtype == "auto" else 4)
    assert gpu["blocks_leaked"] == 0
    if store_dtype == "auto":
        assert gpu["agreed"] == gpu["total"] == 108 > gpu["full_attention_agreed"]

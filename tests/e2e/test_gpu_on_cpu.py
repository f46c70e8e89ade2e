"""Proof 1 for the CUDA worker, on a CPU: tokens equal the oracle's, decode steps replayed.

Everything of the CUDA path runs, decode steps by FlashAttention or by our kernel, but
FlashAttention's kernel and the graphs themselves (``gpu_on_cpu.py``); that needs Triton's
interpreter, so a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kernel", ["flash", "triton"])
def test_tokens_equal_the_oracle(kernel, tiny_model):
    environment = dict(
        os.environ,
        TRITON_INTERPRET="1",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests" / "triton_cpu")]),
        KVEVICT_TEST_STOCK="FLASH_ATTN",
        KVEVICT_TEST_KERNEL=kernel,
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.gpu_script", str(tiny_model)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert result["builder"] == "EvictingFlashMetadataBuilder"
    assert result["kernel"] == kernel
    assert result["replays"] > 20
    assert result["agreed"] == result["total"] == 64 + 9 + 30 + 6
    assert result["full_attention_agreed"] < result["total"]
    assert result["evictions_at_point"]
    assert result["evictions_on_worker"] == result["evictions"] >= 4
    assert result["evictions_decode"] >= 1
    assert result["blocks_leaked"] == 0

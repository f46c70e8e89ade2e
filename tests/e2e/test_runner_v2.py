"""Proof 6: Model Runner V2, with the synchronous and with the async scheduler.

V2 needs Triton, so it runs in a process of its own under Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.v2_script import NEW_TOKENS
from tests.nightly import nightly

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "scheduler, store_dtype",
    [nightly("sync", "auto"), ("async", "auto"), nightly("async", "int4")],
)
def test_tokens_equal_the_oracle(tiny_model, scheduler, store_dtype):
    environment = dict(
        os.environ,
        TRITON_INTERPRET="1",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests" / "triton_cpu")]),
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.v2_script", str(tiny_model), scheduler, store_dtype],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert result["async_scheduling"] == (scheduler == "async")
    assert result["batch_queue_size"] == (2 if scheduler == "async" else 1)
    assert result["agreed"] == result["total"] == 3 * 4 * NEW_TOKENS
    # The third time host memory has what the cache lost: whole blocks before the windows. The
    # second prompt does not fill a store in few bits, and has no window.
    assert result["loaded"] == 256 + (128 if store_dtype == "int4" else 96) + 160
    # The second time it takes the store of the first.
    assert result["evictions_at_point"] == 3 and result["stores_reused"] == 1
    assert result["full_attention_agreed"] < result["total"] * 0.9
    assert result["evictions"] >= 10
    assert result["audited"] >= 10 and result["audit_off_by"] < 1e-3
    assert result["audited"] + result["audits_dropped"] == result["evictions"]
    assert result["evictions_on_worker"] == result["evictions"]
    assert result["blocks_leaked"] == 0

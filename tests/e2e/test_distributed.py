"""Tensor parallelism: every rank evicts its own heads, and all hold the same blocks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tp_script import EVICTION, NEW_TOKENS, PROMPTS
from tests.oracles.engine import engine


def two_ranks(model: Path, policy: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.tp_script", str(model), policy],
        cwd=Path(__file__).parents[2],
        env=os.environ | dict(VLLM_CPU_OMP_THREADS_BIND="0|1"),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def compared(model: Path, policy: str) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of one rank and of two, whose evictions and blocks are those of one."""
    with engine(model, dict(policy=policy, **EVICTION), max_num_batched_tokens=256) as run:
        alone = run.generate(PROMPTS, NEW_TOKENS)
        counters = run.counters.as_dict()
    result = two_ranks(model, policy)
    first, second = result["rounds"]
    assert first == second, "also with prefix-cache hits"
    assert result["leaked"] == 0
    for name in ("evictions", "store_blocks_allocated", "tokens_evicted"):
        assert result["counters"][name] == 2 * counters[name] > 0
    assert [len(output) for output in first] == [NEW_TOKENS] * len(PROMPTS)
    return alone, first


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize("policy", ["snapkv", "ada-snapkv", "tova", "nacl"])
def test_two_ranks(tiny_model_kv4, policy):
    alone, together = compared(tiny_model_kv4, policy)
    if not policy.startswith("ada-"):
        assert together == alone, "a uniform budget does not depend on how heads are split"
    else:
        assert together != alone, "an adaptive one does: two heads share it instead of four"

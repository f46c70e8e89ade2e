"""Tensor parallelism: every rank evicts its own heads, and all hold the same blocks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_audit import listen
from tests.e2e.tp_script import (
    EVICTION,
    NEW_TOKENS,
    POINT,
    PREPARED,
    PROMPTS,
    QUESTIONS,
    SHARED,
    SHARING,
)
from tests.oracles.engine import engine


def two_ranks(model: Path, policy: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.tp_script", str(model), policy, str(folder)],
        cwd=Path(__file__).parents[2],
        env=os.environ | dict(VLLM_CPU_OMP_THREADS_BIND="0|1"),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def compared(
    model: Path, policy: str, folder: Path
) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
    """Tokens of one rank and of two, whose evictions and blocks are those of one; all of two."""
    with engine(model, dict(policy=policy, **EVICTION), max_num_batched_tokens=256) as run:
        alone = run.generate(PROMPTS, NEW_TOKENS)
        counters = run.counters.as_dict()
    result = two_ranks(model, policy, folder)
    first, second = result["rounds"]
    assert first == second, "also with prefix-cache hits"
    assert result["leaked"] == 0
    for name in ("evictions", "store_blocks_allocated", "tokens_evicted"):
        assert result["counters"][name] == 2 * counters[name] > 0
    assert [len(output) for output in first] == [NEW_TOKENS] * len(PROMPTS)
    return alone, first, result


def check_sharing(model: Path, policy: str, result: dict[str, Any]) -> None:
    """Questions about one document, of which the first two are the same, on two ranks."""
    for name, taken in (("point", len(QUESTIONS) - 1), ("prepared", len(QUESTIONS))):
        tokens, counters = result[name]["tokens"], result[name]["counters"]
        assert tokens[0] == tokens[1], "whoever made the store"
        assert (counters["stores_published"], counters["stores_reused"]) == (1, taken)
        assert counters["evictions_prefill"] == 1
    assert counters["preparations"] == 1 and counters["preparations_failed"] == 0
    for tier in ("memory", "file"):
        assert result[tier]["tokens"] == result["point"]["tokens"], "each rank gets its own part"
        assert result[tier]["counters"][f"stores_restored_{tier}"] == 1
    if policy.startswith("ada-"):
        return
    settings = dict(policy=policy, **EVICTION)
    asked = [[each] * len(QUESTIONS) for each in (POINT, PREPARED)]
    with engine(model, settings, max_num_batched_tokens=256) as run:
        assert result["point"]["tokens"] == run.generate(QUESTIONS, SHARED, asked[0])
        assert run.counters.stores_reused == 0 and run.counters.evictions == len(QUESTIONS)
    options = dict(max_num_batched_tokens=256, enable_prefix_caching=True)
    with engine(model, settings, **options) as run:
        assert result["prepared"]["tokens"] == run.generate(QUESTIONS, SHARED, asked[1])
        assert run.counters.preparations == 1


def check_audits(model: Path, policy: str, result: dict[str, Any]) -> None:
    """Each rank has half of the vocabulary and of the heads; what they find is what one finds."""
    told = sorted(nats for *_, nats, _ in result["audits"])
    assert len(told) == result["counters"]["evictions"] - result["counters"]["audits_dropped"] > 8
    if policy.startswith("ada-"):
        return
    settings = dict(policy=policy, audit="100%", **EVICTION)
    options = dict(enable_prefix_caching=True, disable_log_stats=False, max_num_batched_tokens=256)
    with engine(model, settings, **options) as run:
        alone = listen(run)
        for _ in range(2):
            run.generate(PROMPTS, NEW_TOKENS)
    assert told == pytest.approx(sorted(nats for *_, nats, _ in alone), rel=1e-3)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize("policy", ["snapkv", "ada-snapkv", "tova", "nacl"])
def test_two_ranks(tiny_model_kv4, policy, tmp_path):
    alone, together, result = compared(tiny_model_kv4, policy, tmp_path)
    if not policy.startswith("ada-"):
        assert together == alone, "a uniform budget does not depend on how heads are split"
    else:
        assert together != alone, "an adaptive one does: two heads share it instead of four"
    check_audits(tiny_model_kv4, policy, result)
    if policy in SHARING:
        check_sharing(tiny_model_kv4, policy, result)

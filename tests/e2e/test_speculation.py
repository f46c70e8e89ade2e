"""Drafts that are accepted and rejected around evictions change no token.

The n-gram proposer brings numba, beside which vLLM 0.32 starts no second engine in one process.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def of_size(policy: str):
    return pytest.param(policy, marks=() if policy == "ada-snapkv" else pytest.mark.nightly)


@pytest.mark.parametrize(
    "policy", [of_size(policy) for policy in ("ada-snapkv", "pyramidkv", "h2o")]
)
def test_tokens_and_evictions_are_those_without_drafts(policy, tiny_model):
    """Each place around an eviction sees a right draft and a wrong one."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.speculation_script", str(tiny_model), policy],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["agreed"] == found["total"]
    assert found["full_attention_agreed"] < 0.9 * found["total"]
    assert found["evictions_of_a_request"] >= 3
    assert found["accepted"] > 0 and found["rejected"] > 0
    assert found["postponed"] == found["blocks_leaked"] == 0

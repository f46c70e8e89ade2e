"""What vLLM says without this package, from a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stock_script import MARK, RESULT

ROOT = Path(__file__).parents[2]


def run_stock(model: Path, *arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    """Run ``stock_script``; returns its result and its log up to where eviction starts."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.stock_script", str(model), *arguments],
        cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    log, rest = done.stdout.split(MARK)
    return json.loads(rest.split(RESULT)[1].splitlines()[0]), log


@pytest.fixture(scope="session")
def stock(tiny_model) -> dict[str, Any]:
    """What vLLM says in a process that loads no plugin, its log included."""
    result, log = run_stock(tiny_model, VLLM_PLUGINS="")
    return result | dict(log=log)

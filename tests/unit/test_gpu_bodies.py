"""The tests that need a GPU cannot rot: their bodies run on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import cached_tiny_llama
from tests.nightly import nightly

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cases", [1, nightly(2)])
def test_every_body_runs(cases):
    cached_tiny_llama(kv_heads=2)  # Where a GPU is pretended, torch could not make it.
    environment = os.environ | {
        "KVEVICT_CASES": str(cases),
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "triton_cpu")]),
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu_bodies", "-m", "gpu", "tests/gpu"]
    command += ["-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20 + 10 * cases, done.stdout[-3000:]

"""Triton reads TRITON_INTERPRET when it is imported: its kernels are tested in another process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import nightly

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


# All take a minute.
SOME = "sinks or smallest_slice or only_evicted or replayed_decode or centers or warm_up"


@pytest.mark.parametrize("chosen", [SOME, nightly("")], ids=["some", "all"])
def test_kernels_in_the_interpreter(chosen):
    environment = dict(
        os.environ,
        TRITON_INTERPRET="1",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests" / "triton_cpu")]),
    )
    command = [sys.executable, "-m", "pytest", "tests/interpreted", "-q", "-p", "no:cacheprovider"]
    command += ["-k", chosen] if chosen else []
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= (8 if chosen else 30), done.stdout
    assert "skipped" not in done.stdout

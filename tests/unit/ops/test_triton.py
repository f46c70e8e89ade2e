"""Triton reads TRITON_INTERPRET when it is imported: its kernels are tested in another process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def test_kernels_in_the_interpreter():
    environment = dict(
        os.environ,
        TRITON_INTERPRET="1",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests" / "triton_cpu")]),
    )
    command = [sys.executable, "-m", "pytest", "tests/interpreted", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 30, done.stdout
    assert "skipped" not in done.stdout

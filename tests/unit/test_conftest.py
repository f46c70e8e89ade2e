"""A process that ends in a test costs that test: the others run, once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os, signal, time
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_one(number):
    if number == {fatal}:
        time.sleep(3)  # The other process has nothing left by then.
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("fatal", [0, 4])
def test_a_process_that_ends_costs_one_test(tmp_path: Path, fatal: int) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import SharedServers, pytest_xdist_make_scheduler\n"
    )
    for name in "abcd":
        number = fatal if name == "d" else -1
        (tmp_path / f"test_{name}.py").write_text(TESTS.format(count=6, fatal=number))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope"]
    done = subprocess.run(
        [*command, "--no-loadscope-reorder", "-p", "no:cacheprovider", "--rootdir", ".", "."],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert "1 failed, 23 passed" in done.stdout, done.stdout[-2000:]
    assert f"crashed while running 'test_d.py::test_one[{fatal}]'" in done.stdout

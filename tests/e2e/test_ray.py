"""deploy/ray for real: two replicas behind one OpenAI endpoint, eviction counted on both."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
RESULT = "RESULT "
MARK = "KVEVICT_RAY_TEST"

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed; `make setup` installs it"
)


def marked(mark: str) -> list[psutil.Process]:
    """Processes that inherited the mark, Ray's daemons included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    mark = uuid.uuid4().hex
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="kv-ray-", dir="/tmp") as folder:
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.ray_script", folder],
                cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {MARK: mark},
            )  # fmt: skip
            try:
                process.wait(timeout=900)
                left = [process.cmdline() for process in marked(mark)]
            finally:
                for straggler in marked(mark):
                    with contextlib.suppress(psutil.Error):
                        straggler.kill()
                process.wait()
        text = log.read_text()
    assert process.returncode == 0, text[-6000:]
    return json.loads(text.split(RESULT)[1].splitlines()[0]) | dict(outlived=left)


def test_both_replicas_evict(run):
    assert len(run["evictions"]) == 2 and min(run["evictions"].values()) >= 1, run["evictions"]
    assert run["shortest"] > 2 * 128
    # Each of these prompts is evicted once, at the end of its prefill; Ray publishes late.
    assert 2 <= sum(run["evictions"].values()) <= run["asked"]


def test_bad_settings_are_the_clients_fault(run):
    status, answer = run["refused"]
    assert status == 400, answer
    assert "kv_eviction_budget: give tokens" in answer


def test_chat(run):
    status, answer = run["chat"]
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] >= 1


def test_all_of_rays_processes_end(run):
    assert run["processes"] > 5 and run["left"] == [] and run["outlived"] == []

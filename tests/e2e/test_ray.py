"""Ray: two replicas of deploy/ray behind one OpenAI endpoint, and workers that are actors."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.ranks_script import EVICTION, NEW_TOKENS, PROMPTS
from tests.e2e.test_distributed import NEED_TWO, STAGES, TENSOR
from tests.oracles.engine import engine

ROOT = Path(__file__).parents[2]
RESULT = "RESULT "
MARK = "KVEVICT_RAY_TEST"
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "deploy" / "ray"))),
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "0",
}
"""Actors import the tests and the application of deploy/ray. The other variable is as in
tests/e2e/test_distributed.py."""

pytestmark = [
    # Ray's own processes import vLLM three times: two minutes for all of them.
    pytest.mark.nightly,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed; `make setup` installs it"
    ),
]


def marked(mark: str) -> list[psutil.Process]:
    """Processes that inherited the mark, Ray's daemons included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def outlive(mark: str, patience: float = 60) -> list[str]:
    """Marked processes that still run after ``patience`` seconds.

    Trackers of shared memory end when their pipes close. One that has ended counts as ended,
    whether or not who adopted it has reaped it: ``psutil.wait_procs`` would wait for that, too.
    """
    deadline = time.monotonic() + patience
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [str(process) for process in left]


def run_script(module: str, *arguments: str) -> dict[str, Any]:
    """What a script says that starts Ray in the folder that is its last argument."""
    mark = uuid.uuid4().hex
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="kv-ray-", dir="/tmp") as folder:
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, folder],
                cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT | {MARK: mark},
            )  # fmt: skip
            try:
                process.wait(timeout=900)
                left = outlive(mark)
            finally:
                for straggler in marked(mark):
                    with contextlib.suppress(psutil.Error):
                        straggler.kill()
                process.wait()
        text = log.read_text()
    assert process.returncode == 0, text[-6000:]
    return json.loads(text.split(RESULT)[1].splitlines()[0]) | dict(outlived=left)


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    return run_script("tests.e2e.ray_script")


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


@NEED_TWO
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        pytest.param("ada-snapkv", STAGES, marks=pytest.mark.nightly),
        pytest.param("snapkv", TENSOR, marks=pytest.mark.nightly),
    ],
    ids=["stages", "tensor"],
)
def test_workers_that_are_actors(tiny_model_kv4: Path, policy: str, options: Any) -> None:
    """vLLM's executor for several machines: tokens, evictions and blocks are those of one rank."""
    with engine(tiny_model_kv4, EVICTION | dict(policy=policy), max_num_batched_tokens=256) as run:
        alone = run.generate(PROMPTS, NEW_TOKENS)
        counters = run.counters.as_dict()
    asked = str(tiny_model_kv4), policy, json.dumps(options)
    result = run_script("tests.e2e.ray_executor_script", *asked)
    assert result["executor"] == "RayExecutorV2"
    assert result["tokens"] == alone
    assert result["leaked"] == 0 and not result["outlived"]
    for name in ("evictions", "store_blocks_allocated", "tokens_evicted"):
        assert result["counters"][name] == counters[name] > 0

"""Environment of every test, the models, and the skip of tests that need a GPU."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from vllm_kvevict.processes import guard

# A busy machine is slow, which says nothing of the code.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")

# vLLM reads these when it is imported.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two OpenMP threads on a busy 2-core machine wait for each other: measured 63 s instead of 9 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same of Numba's, which n-gram drafts bring: two ranks took 252 s instead of 23.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
# Else every server of every test pins its worker to the same core.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# A server's worker runs in the process of its engine: two processes import vLLM, not three.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Processes that tests start fork theirs; this process and those of pytest-xdist do not load it.
QUICK_START = str(Path(__file__).parent / "quick_start")
sys.path[:] = [path for path in sys.path if path != QUICK_START]
_paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
if QUICK_START not in _paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([*_paths, QUICK_START])


def no_gpu_reason() -> str | None:
    """Why CUDA cannot be used here, or None where it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch does not import: {error}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False: no usable NVIDIA GPU"
    return None


class SharedServers(LoadScopeScheduling):  # type: ignore[misc]
    """Tests of a file run in one process, and those of the folder whose servers are shared.

    xdist's own groups (3.8) are lost under pytest 9.2, so that each server was started twice.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        return str(path.parent if path.parent.name == "faults" else path)

    def remove_node(self, node: Any) -> str | None:
        """Give others what an ended process had left, without the test that ended it.

        xdist gives them what it had finished, too, and waits for ever for reports of that.
        """
        units = self.assigned_work.pop(node)
        left = [(scope, test) for scope, unit in units.items() for test in unit if not unit[test]]
        for scope, test in left[1:]:
            self.workqueue.setdefault(scope, {})[test] = False
        for other in self.nodes:
            self._reschedule(other)
        return left[0][1] if left else None


def pytest_configure(config: pytest.Config) -> None:
    """An interrupt ends the workers of xdist, and the servers of tests."""
    if not hasattr(config, "workerinput"):
        guard()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Garbage collections leave out what imports made, here and while tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedServers | None:
    return SharedServers(config, log) if config.getoption("dist") == "loadscope" else None


LONGEST = ("test_gpu_bodies.py", "test_fused.py", "test_emulated.py", "test_triton.py")
"""Files of units that take longest. They come first, because at the end one process would wait for
the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    units = Path(__file__).parent / "unit"
    items.sort(key=lambda item: units in item.path.parents and 1 + (item.path.name not in LONGEST))
    needing = [item for item in items if item.get_closest_marker("gpu")]
    reason = no_gpu_reason() if needing else None
    if reason:
        for item in needing:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests that need a GPU did not run."""
    skipped = terminalreporter.stats.get("skipped", [])
    if idle := sum("gpu" in report.keywords for report in skipped):
        terminalreporter.write_line(f"{idle} tests that need a GPU did not run.")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A 4-layer Llama with 8 query and 2 KV heads of size 32, float32, random weights."""
    from tests.models import cached_tiny_llama

    return cached_tiny_llama(kv_heads=2)


@pytest.fixture(scope="session")
def tiny_model_kv4() -> Path:
    """The same with 4 KV heads."""
    from tests.models import cached_tiny_llama

    return cached_tiny_llama(kv_heads=4)

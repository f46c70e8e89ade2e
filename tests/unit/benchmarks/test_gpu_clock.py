"""What times a GPU, on a pretended one; and the kernels' calls of the eviction benchmark."""

import time
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from subprocess import run

import pytest
import torch

from benchmarks.gpu import eviction
from benchmarks.gpu.clock import AHEAD_CYCLES, captured, copy_bandwidth, milliseconds, spread
from benchmarks.gpu.transfers import QUEUE
from tests.pretend_gpu import pretended
from tests.unit.benchmarks.test_gpu_eviction import small
from tests.unit.ops.cuda.conftest import emulated, emulation  # noqa: F401

ROOT = Path(__file__).parents[3]


class Event:
    """Two of them lie as many milliseconds apart as runs were queued before."""

    queued = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.queued
        Event.queued += 1

    def elapsed_time(self, other: "Event") -> int:
        return other.at - self.at


def test_times_are_the_gpus(monkeypatch):
    asleep: list[int] = []
    monkeypatch.setattr("benchmarks.gpu.clock.FLUSH_BYTES", 64)
    ran: list[int] = []
    with pretended(monkeypatch) as watch:
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", asleep.append)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: asleep.append(0))
        times = milliseconds(lambda: ran.append(1), torch.device("cuda"), 5)
        bandwidth = copy_bandwidth(torch.device("cuda"), 2000)
        assert not watch.waits
    assert times == [1] * 5 and len(ran) == 3 + 5
    assert asleep[0] == 0 and all(asleep[1:6]), "each run is queued while the GPU idles"
    assert asleep[6] == 0
    assert bandwidth == 2000 / 1e-3
    assert spread([4.0, 1.0, 2.0, 3.0]) == dict(median_ms=2.5, low_ms=2.0, high_ms=3.0)
    assert spread([8.0], parts=4)["median_ms"] == 2.0


def test_the_gpu_idles_longer_than_the_host_queues(monkeypatch):
    asleep: list[int] = []
    for name, value in dict(Event=Event, _sleep=asleep.append, synchronize=lambda: None).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("benchmarks.gpu.clock.FLUSH_BYTES", 64)
    with pretended(monkeypatch):
        milliseconds(lambda: None, torch.device("cuda"), 1)
        milliseconds(lambda: time.sleep(0.02), torch.device("cuda"), 1)
    assert asleep[0] == AHEAD_CYCLES and asleep[1] > 3 * 0.02 * 2e9


def test_a_step_is_captured_once_and_replayed(monkeypatch):
    """``run`` lives as long as its graph, which reads the tensors that it holds."""
    log: list[str] = []

    class Stream:
        def wait_stream(self, other: "Stream") -> None:
            pass

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    for name, value in dict(
        Stream=Stream, current_stream=Stream, synchronize=lambda: None, CUDAGraph=Graph,
        stream=lambda stream: nullcontext(), graph=lambda graph: nullcontext(),
    ).items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    run = partial(log.append, "run")
    alive = weakref.ref(run)
    replay = captured(run, torch.device("cuda"))
    del run
    assert alive() is not None and log == ["run"] * 3
    replay()
    assert log[3:] == ["replay"]
    assert captured(replay, torch.device("cpu")) is replay


@pytest.mark.slow
@pytest.mark.nightly
def test_the_calls_of_the_eviction_benchmark(emulation, monkeypatch):  # noqa: F811
    """On emulated kernels, one after another and as the worker's pass; both keep the same."""
    args = small("ada-snapkv", monkeypatch)
    case = eviction.Pass(200, args, torch.device("cpu"))
    before = [cache.clone() for cache in case.caches]
    for call in case.kernels().values():
        call()
    by_kernels = [cache.clone() for cache in case.caches]
    assert not torch.equal(by_kernels[0], before[0])
    for cache, old in zip(case.caches, before, strict=True):
        cache.copy_(old)
    case.worker(fused=True)()
    assert all(map(torch.equal, case.caches, by_kernels))


@pytest.mark.parametrize(
    "name", ["run", "prepare", "parts", *(f"queue/{call.script}" for call in QUEUE)]
)
def test_the_scripts_parse(name):
    assert run(["bash", "-n", ROOT / "benchmarks" / "gpu" / f"{name}.sh"]).returncode == 0

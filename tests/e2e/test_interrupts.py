"""Real commands end at a signal, whatever they do at that moment, with every process of theirs."""

import sys
from pathlib import Path

import pytest

from benchmarks.smollm2 import ModelUnavailable, real_model
from tests.commands import MOMENTS, WAYS, Command

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

DEMO = "-m benchmarks.demo --questions 1 --requests 2".split()

SERVER_TEST = """
from benchmarks.server import Server

def test_one(tiny_model, tmp_path):
    flags = "--enforce-eager --dtype float32 --kv-cache-memory-bytes 64M --max-model-len 1024"
    with Server(tiny_model, flags.split(), tmp_path / "log") as server:
        open({path!r}, "w").write("READY")
        body = dict(model=server.model, prompt=[1] * 8, max_tokens=1000, ignore_eos=True)
        while True:
            server.post("/v1/completions", body)
"""


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return real_model()
    except ModelUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("number, alone", WAYS)
@pytest.mark.parametrize("moment", ["servers start", "questions", "load"])
def test_a_benchmark(model: Path, tmp_path: Path, moment: str, number: int, alone: bool) -> None:
    """While its servers start, while it asks, and under load."""
    command = Command([sys.executable, *DEMO], tmp_path / "log")
    command.wait_for(MOMENTS[moment][1], 600)
    command.interrupt(number, alone)


@pytest.mark.parametrize("number, alone", WAYS)
def test_calibrate(model: Path, tmp_path: Path, number: int, alone: bool) -> None:
    words = [sys.executable, "-m", "vllm_kvevict", "calibrate", str(model)]
    command = Command([*words, "--output", str(tmp_path / "profile.json")], tmp_path / "log")
    command.wait_for(MOMENTS["calibrate"][1] + ":", 600)
    command.interrupt(number, alone)
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.parametrize("number, alone", WAYS)
def test_a_first_start(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, alone: bool
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(tiny_model)]
    words += "--kv-eviction auto --enforce-eager --host 127.0.0.1 --port 0".split()
    words += "--kv-cache-memory-bytes 64M --max-model-len 1024".split()
    command = Command(words, tmp_path / "log")
    command.wait_for(MOMENTS["first start"][1], 600)
    command.interrupt(number, alone)


@pytest.mark.parametrize("number, alone", [WAYS[0], WAYS[1]])
def test_tests(tiny_model: Path, tmp_path: Path, number: int, alone: bool) -> None:
    ready = tmp_path / "ready"
    ready.write_text("")
    (tmp_path / "test_one.py").write_text(SERVER_TEST.format(path=str(ready)))
    words = [sys.executable, "-m", "pytest", "-n", "2", "-p", "tests.conftest", "--rootdir"]
    command = Command([*words, str(tmp_path), str(tmp_path / "test_one.py")], tmp_path / "log")
    log, command.log = command.log, ready
    command.wait_for("READY", 600)
    command.log = log
    command.interrupt(number, alone)

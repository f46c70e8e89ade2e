"""Real commands end at a signal, whatever they do at that moment, with every process of theirs.

Set-up; the start of servers, questions and load of the demo; a model that is calibrated, by command
and by a server; `measure`; a benchmark with an engine in its own process; and tests.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server import Server
from benchmarks.smollm2 import ModelUnavailable, real_model
from tests.commands import MOMENTS, ROOT, WAYS, Command
from vllm_kvevict.serving.cpu_dtype import fast_dtype

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
def test_setting_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, alone: bool
) -> None:
    """While pip downloads. GNU make does not pass on a SIGINT that it alone gets."""
    for name in ("Makefile", "pyproject.toml", "vllm_kvevict/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "packaging", tmp_path / "packaging")
    monkeypatch.setenv("KVEVICT_DEVICE", "cpu")
    words = ["packaging/setup_env.sh"] if alone else ["make", "setup"]
    command = Command(words, tmp_path / "log", tmp_path)
    command.wait_for(MOMENTS["set-up"][1], 600)
    time.sleep(2)
    command.interrupt(number, alone)
    assert not (tmp_path / ".venv" / ".setup-stamp").exists()


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


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = "--kv-eviction auto --kv-eviction-allow none --enforce-eager --block-size 32".split()
    flags += ["--kv-cache-memory-bytes", "1G", "--max-model-len", "2048", "--dtype", fast_dtype()]
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(model, flags, log, timeout_s=900) as running:
        yield running


@pytest.mark.parametrize("number, alone", WAYS)
def test_measure(server: Server, tmp_path: Path, number: int, alone: bool) -> None:
    """While it asks a server, which goes on."""
    row = dict(context="The door of room 4 is red. " * 100, question="Which colour?", answer="red")
    lines = [json.dumps(row | {"context": f"{i}. {row['context']}"}) for i in range(100)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines) + "\n")
    words = [sys.executable, "-m", "vllm_kvevict", "measure", str(tmp_path / "questions.jsonl")]
    command = Command([*words, "--base-url", server.url], tmp_path / "log")
    command.wait_for(MOMENTS["measure"][1], 600)
    time.sleep(2)
    command.interrupt(number, alone)
    body = dict(model=server.model, prompt="The door is", max_tokens=4)
    assert server.post("/v1/completions", body)["choices"]


@pytest.mark.parametrize("number, alone", WAYS)
def test_an_engine_of_a_benchmark(model: Path, tmp_path: Path, number: int, alone: bool) -> None:
    """While the process of the command itself computes."""
    words = [sys.executable, *"-m benchmarks.audit --part answers --out".split()]
    command = Command([*words, str(tmp_path / "audit.json")], tmp_path / "log")
    command.wait_for(MOMENTS["benchmark"][1] + ":   0%", 600)
    time.sleep(2)
    command.interrupt(number, alone)
    assert not (tmp_path / "audit.json").exists()


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

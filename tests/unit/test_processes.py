"""Commands end at SIGINT and SIGTERM with every process that they started, and show no traceback.

Each runs in a session of its own. A signal goes to its process group, as a terminal sends one, or
to its first process alone. What it waits for takes ten minutes, so that a command which waits for
it fails the test.
"""

import ast
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.commands import MOMENTS, ROOT, WAYS, Command, processes
from tests.http_stand_in import JsonHandler, served
from tests.nightly import covering, nightly, some
from vllm_kvevict.processes import Interrupted, interruptible

STUBBORN = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
os.fork()
print("ready", flush=True)
time.sleep(600)
"""
"""Two processes that ignore signals."""

POOL = f"""
from vllm_kvevict.processes import guard
guard()
import subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
pipe = subprocess.PIPE
server = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=pipe, start_new_session=True)
server.stdout.readline()
subprocess.Popen(["sleep", "600"])
def fail(_):
    server.wait()
    raise RuntimeError("the server is gone")
with ThreadPoolExecutor(2) as threads:
    print("READY", flush=True)
    list(threads.map(fail, range(3)))
"""
"""As a benchmark: servers in sessions of their own, a client, and threads that wait for them."""

BUSY = """
from vllm_kvevict.processes import guard
guard()
import ctypes
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
lock(mutex)
print("READY", flush=True)
lock(mutex)
"""
"""The main thread is in C code, where no handler of Python runs."""

BENCHMARK = """
import sys
sys.argv[0] = "-m"
import benchmarks
print("READY", flush=True)
import time
time.sleep(600)
"""
"""What Python does for ``python -m benchmarks.NAME`` before it imports the module."""

FIRST_START = f"""
import asyncio, sys
{{install}}
from types import SimpleNamespace
from vllm_kvevict.serving import calibrate, plugin
async def start():
    with plugin._sentence(SimpleNamespace(_kv_eviction_from_flags=True)):
        print("READY", flush=True)
        calibrate._run([sys.executable, "-c", {STUBBORN!r}], 600)
    print("served", flush=True)
{{run}}
"""
"""A server's event loop, inside which a model is calibrated."""

CONFIGURATION = """
import asyncio, time
from types import SimpleNamespace
from vllm_kvevict.serving import calibrate, plugin
def calibrated(*args):
    print("calibrated", flush=True)
    time.sleep(600)
calibrate.calibrated = calibrated
calibrate.check_nodes = plugin._check_version = lambda *args, **kwargs: None
def original(engine_args):
    print("READY", flush=True)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        time.sleep(0.1)
async def start():
    settings = {"kv_eviction": {"policy": "auto"}}
    given = SimpleNamespace(additional_config=settings, _kv_eviction_from_flags=True)
    plugin._create(original, given)
asyncio.run(start())
"""
"""vLLM reads a model's configuration; the calibration would come after it."""

DOWNLOAD = """
import asyncio, time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from vllm_kvevict.serving import plugin
async def start():
    with plugin._sentence(SimpleNamespace(_kv_eviction_from_flags=True)):
        with ThreadPoolExecutor(2) as threads:
            threads.submit(time.sleep, 600)
            print("READY", flush=True)
            time.sleep(600)
asyncio.run(start())
"""
"""Files are downloaded in threads, which the main thread waits for as it unwinds."""

LOOPS = {
    "asyncio": FIRST_START.format(install="", run="asyncio.run(start())"),
    "uvloop": FIRST_START.format(install="import uvloop", run="uvloop.run(start())"),
}


SCRIPTS = (
    pytest.param(POOL, 3, id="pool"),
    pytest.param(BUSY, 0, id="busy"),
    pytest.param(BENCHMARK, 0, id="benchmark"),
)


@pytest.mark.parametrize("script, below, number, alone", covering(SCRIPTS, WAYS))
@pytest.mark.slow
def test_everything_ends(tmp_path, script, below, number, alone):
    command = Command([sys.executable, "-c", script], tmp_path / "log")
    command.wait_for("READY")
    assert len(processes(command.process.pid)) == below + 1
    assert "Interrupted." in command.interrupt(number, alone)
    assert command.process.returncode in (-number, 128 + number)


@pytest.mark.slow
def test_threads_start_nothing_after_the_signal(tmp_path):
    """As a benchmark that is interrupted while it starts its servers."""
    script = f"""
from vllm_kvevict.processes import guard
guard()
import subprocess, threading, time
def start():
    while True:
        subprocess.Popen(["sh", "-c", "sleep 600; true", {str(tmp_path)!r}], start_new_session=True)
        time.sleep(0.05)
for _ in range(4):
    threading.Thread(target=start).start()
time.sleep(0.5)
print("READY", flush=True)
time.sleep(600)
"""
    command = Command([sys.executable, "-c", script], tmp_path / "log")
    command.wait_for("READY")
    try:
        command.interrupt(signal.SIGINT, alone=True)
        assert started(str(tmp_path)) == []
    finally:
        for process in started(str(tmp_path)):
            os.killpg(process.pid, signal.SIGKILL)


def started(mark: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if (one.info["cmdline"] or [])[-1:] == [mark]]


@pytest.mark.parametrize("number, alone", [*WAYS[:1], *(nightly(*way.values) for way in WAYS[1:])])
@pytest.mark.parametrize("script", [CONFIGURATION, DOWNLOAD], ids=["configuration", "download"])
@pytest.mark.slow
def test_a_first_start_ends_before_the_measurement(tmp_path, script, number, alone):
    command = Command([sys.executable, "-c", script], tmp_path / "log")
    command.wait_for("READY")
    assert "calibrated" not in command.interrupt(number, alone)
    assert command.process.returncode in (-number, 128 + number)


@pytest.mark.parametrize(
    "loop, number, alone",
    covering(some(LOOPS, "uvloop"), [*WAYS[:1], *(nightly(*way.values) for way in WAYS[1:])]),
)
@pytest.mark.slow
def test_a_first_start_ends_with_the_measurement(tmp_path, loop, number, alone):
    """The loop's own handler would only note the signal until the measurement is over."""
    command = Command([sys.executable, "-c", LOOPS[loop]], tmp_path / "log")
    command.wait_for("READY")
    # Itself, two that measure, and their leash.
    while len(processes(command.process.pid)) < 4:
        assert command.process.poll() is None, command.log.read_text()
        time.sleep(0.05)
    said = command.interrupt(number, alone)
    assert "served" not in said
    assert command.process.returncode in (-number, 128 + number)


def test_a_forked_child_ends_alone(tmp_path):
    """It has its parent's handlers, and would report its own signal to its parent."""
    script = """
import os, signal, sys, time
from vllm_kvevict.processes import guard
guard()
child = os.fork()
if not child:
    print("READY", flush=True)
    time.sleep(600)
time.sleep(1)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
time.sleep(1)
print("DONE", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "READY\nDONE\n"), done.stderr


def test_an_ignored_signal_stays_ignored(tmp_path):
    script = "import signal; signal.signal(2, signal.SIG_IGN)\n" + BENCHMARK.replace(
        "time.sleep(600)", "import os; os.kill(os.getpid(), 2); time.sleep(0.5); print('went on')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "went on" in done.stdout, done.stderr


class Slow(JsonHandler):
    """Answers with the full cache, and else only if it is told to."""

    answers = False
    asked = 0

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        full = self.body()["vllm_xargs"].get("kv_eviction") == "none"
        type(self).asked += 1
        while not (full or type(self).answers):
            time.sleep(0.05)
        self.reply(200, {"choices": [{"message": {"content": "red"}}]})


@pytest.mark.parametrize("number, alone", [WAYS[1], *(nightly(*way.values) for way in WAYS[::2])])
@pytest.mark.slow
def test_measure_goes_on_from_its_file(tmp_path, number, alone):
    file, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    row = dict(context="The door is red.", question="Which colour?", answer="red")
    file.write_text("".join(json.dumps(row | {"context": f"{i}"}) + "\n" for i in range(3)))
    Slow.answers, Slow.asked = False, 0
    with served(Slow) as url:
        words = [sys.executable, "-m", "vllm_kvevict", "measure", str(file), "--base-url", url]
        words += ["--budgets", "50%", "--output", str(answers)]
        command = Command(words, tmp_path / "log")
        command.wait_for("50% known")
        while Slow.asked < 6:
            time.sleep(0.05)
        command.interrupt(number, alone)
        Slow.answers = True
        assert len(answers.read_text().splitlines()) == 3, "the full cache, at once"
        # Killed while it wrote.
        answers.write_text(answers.read_text() + answers.read_text()[:20])
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "full cache: answered in" in done.stderr and Slow.asked == 6 + 6
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
        assert [(one["budget"], one["question"]) for one in rows[::3]] == [
            ("full cache", ""), ("50%", "known"), ("50%", "not known"),
        ]  # fmt: skip
        assert len(rows) == 9 and [line.split()[-5] for line in done.stdout.splitlines()[1:]]
        other = [*words, "--max-tokens", "5"]
        refused = subprocess.run(other, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 1 and "line 1 of" in refused.stderr
    assert len(answers.read_text().splitlines()) == 9, "left as it was"


@pytest.mark.parametrize("file, text", MOMENTS.values(), ids=MOMENTS)
def test_real_commands_print_what_tests_wait_for(file, text):
    """Tests that run at night only wait ten minutes for a text that has another wording by now."""
    source = (ROOT / file).read_text()
    if file.endswith(".py"):
        nodes = ast.walk(ast.parse(source))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    else:
        texts = [line for line in source.splitlines() if line.strip().startswith("say ")]
    assert any(text in one for one in texts if isinstance(one, str))


def test_a_programs_own_handler_stays_and_is_called(monkeypatch):
    """A trainer saves its state at SIGTERM, and makes an engine that calibrates first."""
    # A caller that says that it ends is ended after this time, which would end the tests.
    monkeypatch.setattr("vllm_kvevict.processes.END_AFTER", 1e6)
    calls: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGTERM)
        assert calls == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(Interrupted), interruptible(ends=True):
            signal.raise_signal(signal.SIGTERM)
        assert calls == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize("ends", [False, True])
def test_a_handler_that_is_not_pythons_stays(monkeypatch, ends):
    """It could not be restored."""
    replaced = []
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: replaced.append(number))
    with interruptible(ends):
        pass
    assert not replaced

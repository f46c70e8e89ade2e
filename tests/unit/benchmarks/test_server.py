"""A server and all its processes end, also where no ``finally`` runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.server import Server, ServerFailed
from tests.nightly import nightly

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
# Two processes, of which the second follows the first, as vLLM's do.
STUBBORN = """
import http.server, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "stubborn" else signal.SIG_DFL)
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent or sys.argv[2] == "stubborn":
        time.sleep(0.1)
    os._exit(0)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if sys.argv[2] != "ill" else 503)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
HOLDER = """
import sys, time
from pathlib import Path
from tests.unit.benchmarks.test_server import fake
with fake(Path(sys.argv[1]), sys.argv[2]) as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""


def fake(log: Path, mood: str = "polite", timeout_s: float = 60) -> Server:
    """A server of two processes that is none of vLLM's."""
    server = Server(Path("model"), [], log, timeout_s=timeout_s)
    server.command = [sys.executable, "-c", STUBBORN, str(server.port), mood]
    return server


def members(group: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 60
    while members(group):
        assert time.monotonic() < deadline, f"left behind: {members(group)}"
        time.sleep(0.1)


def test_the_context_ends_every_process(tmp_path):
    with fake(tmp_path / "log") as server:
        group = server.process.pid
        assert len(members(group)) == 2
    assert members(group) == []
    assert server.stop() == -signal.SIGTERM, "stopping twice is fine"


@pytest.mark.parametrize(
    "how, mood", [(signal.SIGTERM, "polite"), nightly(signal.SIGKILL, "stubborn")], ids=str
)
def test_a_killed_test_leaves_no_server_behind(tmp_path, how, mood):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "log"), mood],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        group = int(holder.stdout.readline())
        assert len(members(group)) == 2
    finally:
        holder.send_signal(how)
        holder.communicate()
    wait_until_gone(group)


def test_an_interrupted_start_leaves_no_server_behind(tmp_path, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    server = fake(tmp_path / "log")
    monkeypatch.setattr("benchmarks.server.urllib.request.urlopen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.__enter__()
    assert members(server.process.pid) == []


def test_a_server_that_never_gets_ready_is_ended(tmp_path):
    server = fake(tmp_path / "log", "ill", timeout_s=1)
    with pytest.raises(ServerFailed):
        server.__enter__()
    assert members(server.process.pid) == []

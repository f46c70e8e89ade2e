"""Commands in sessions of their own, which tests interrupt."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]

WAYS = (
    pytest.param(signal.SIGINT, False, id="SIGINT-group"),
    pytest.param(signal.SIGINT, True, id="SIGINT-alone"),
    pytest.param(signal.SIGTERM, True, id="SIGTERM"),
)
"""Signals, and whether they go to a command's first process alone. A terminal sends SIGINT to the
process group."""

DEADLINE_S = 10.0
"""Seconds from a signal in which every process of a command must end, however busy the machine is.
"""

MOMENTS = {
    "set-up": ("packaging/setup_env.sh", "vLLM 0.32.0 for CPU"),
    "servers start": ("benchmarks/demo.py", "vllm serve, a minute"),
    "questions": ("benchmarks/demo.py", ": asking over HTTP"),
    "load": ("benchmarks/demo.py", ": vllm bench serve"),
    "calibrate": ("vllm_kvevict/calibrate/learn.py", "probes"),
    "measure": ("vllm_kvevict/tools/measure/__main__.py", "asking "),
    "benchmark": ("benchmarks/audit/__main__.py", "ada-defensive"),
    "first start": ("vllm_kvevict/serving/calibrate.py", "so it is calibrated now"),
}
"""Moments at which tests interrupt commands: a source file, and the text that it prints then."""


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes(session: int) -> set[psutil.Process]:
    """Processes that run in a session, and their descendants in others."""
    found = set()
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                found |= {process, *process.children(recursive=True)}
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return set(filter(runs, found))


def _heed() -> None:
    """A shell ignores SIGINT in what it starts in the background, such as these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """A command in a session of its own, and what it printed."""

    def __init__(self, words: list[str], log: Path, cwd: Path = ROOT) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd,
                stdin=subprocess.DEVNULL, preexec_fn=_heed,
            )  # fmt: skip

    def wait_for(self, text: str, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def interrupt(self, number: int, alone: bool) -> str:
        """Send a signal; every process must be gone in time. Return what was printed since."""
        known = processes(self.process.pid)
        before = len(self.log.read_text())
        deadline = time.monotonic() + DEADLINE_S
        (os.kill if alone else os.killpg)(self.process.pid, number)
        try:
            # A look at all processes takes long on a busy machine: first the known ones end.
            while self._runs(known):
                late = time.monotonic() > deadline
                assert not late, f"after {DEADLINE_S} s: {set(filter(runs, known))}"
                time.sleep(0.05)
        finally:
            for one in known | processes(self.process.pid):
                if runs(one):
                    one.kill()
        print(f"ended {time.monotonic() - deadline + DEADLINE_S:.1f} s after the signal")
        said = self.log.read_text()[before:]
        assert "Traceback" not in said, said
        assert self.process.returncode, "interrupted, and yet status 0"
        return said

    def _runs(self, known: set[psutil.Process]) -> bool:
        return (
            self.process.poll() is None
            or any(map(runs, known))
            or bool(processes(self.process.pid))
        )

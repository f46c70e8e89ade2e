"""``python -m MODULE`` in processes of their own, forked from one that has imported vLLM.

That takes ten seconds in each process else. What is read from the environment before Python runs,
or when vLLM or Triton is imported, cannot be set for them; ``subprocess`` serves there.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.server import start as executed

ROOT = Path(__file__).parents[1]


@cache
def context() -> Any:
    """Of Python's fork server, one for each process of the tests."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.preloaded"])
    return made


def main(words: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    """Become ``python -m`` of these words, in a session of its own, whose outputs go to files."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in zip((1, 2), outputs, strict=True):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    folders = [str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path += [one for one in folders if one and one not in sys.path]
    sys.argv = words[:]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class Forked:
    """A process that runs a module, with what of ``subprocess.Popen`` its holders use."""

    def __init__(self, words: list[str], environment: dict[str, str], outputs: list[str]) -> None:
        self._process = context().Process(target=main, args=(words, environment, outputs))
        self._process.start()
        self.args, self.pid = words, self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    module: str, *arguments: object, timeout: float = 400, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` of the module gives, in the repository's folder.

    Raises:
        subprocess.TimeoutExpired: It ran longer than ``timeout`` seconds, and was killed with
            what it had started.

    """
    words, settings = [module, *map(str, arguments)], dict(os.environ) | environment
    if "TRITON_INTERPRET" in settings:
        command = [sys.executable, "-m", *words]
        return subprocess.run(
            command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=timeout
        )
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        for output in outputs:
            output.touch()
        process = Forked(words, settings, list(map(str, outputs)))
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        said = [output.read_text(errors="replace") for output in outputs]
    return subprocess.CompletedProcess(words, process.wait(), *said)


def start(command: list[str], log: Path, env: dict[str, str]) -> Any:
    """``benchmarks.server.start`` for a module of Python's, forked where the environment allows."""
    changed = {name for name, value in env.items() if os.environ.get(name) != value}
    python, dash, *words = command
    if (python, dash) != (sys.executable, "-m") or any(
        not name.startswith("VLLM_") for name in changed
    ):
        return executed(command, log, env)
    log.write_text("")
    return Forked(words, dict(env), [str(log)] * 2)

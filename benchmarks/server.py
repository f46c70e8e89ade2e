"""A `vllm serve` process of ours: started, watched and ended by pid."""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.provenance import add_server
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.metrics.prometheus import CAUSES, COUNTERS, PREFIX, REASONS, RESTORED, TIERS
from vllm_kvevict.processes import Leash, end_group

# As a module: where vLLM was unpacked and not installed there is no command `vllm`.
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]


# Below the ports that Linux gives to outgoing connections (from 32768): between the choice and the
# bind, which loads a model first, no connection of another process can take the port.
PORTS = range(16384, 32768)


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of 100 ports between {PORTS.start} and {PORTS.stop - 1} is free")


def start(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, which writes to ``log``."""
    with log.open("w") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


class ServerFailed(RuntimeError):
    """The server ended before it was ready; the message carries the end of its log."""


class Server:
    """``vllm serve MODEL ARGS`` on a free port of 127.0.0.1, as a context manager.

    All its processes end with the context, or with this process if that is killed.

    Args:
        model: Folder of the model.
        args: Further arguments of ``vllm serve``.
        log: File that takes the server's output.
        timeout_s: Longest wait for readiness.
        env: Environment variables on top of this process's.

    """

    def __init__(
        self,
        model: Path,
        args: list[str],
        log: Path,
        timeout_s: float = 300,
        env: dict[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = str(model)
        self.log = log
        self._args = args
        self._timeout_s = timeout_s
        self.command = [
            *VLLM, "serve", self.model, "--host", "127.0.0.1", "--port", str(self.port), *args,
        ]  # fmt: skip
        self._totals = Counters()
        self._env = dict(os.environ, VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1") | (env or {})

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.process = start(self.command, self.log, self._env)
        self._leash = Leash(self.process.pid)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        add_server(self.model, self._args, self.log.read_text(errors="replace"))
        return self

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=2)
                return
            except OSError:
                time.sleep(0.3)
        self.stop()
        raise ServerFailed(f"{' '.join(self.command)}\n{self.log.read_text()[-4000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.stop()

    def stop(self) -> int:
        """End the server and wait for all its processes; what is left after a minute is killed."""
        try:
            self.evictions()
        finally:
            code = self._end()
        return code

    def _end(self) -> int:
        end_group(self.process, 60)
        self._leash.release()
        return self.process.wait()

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels, from /metrics; 0 where it is missing."""
        return total(self.metrics(), name)

    def metrics(self) -> str:
        """All metrics, in Prometheus' text format."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict) -> dict:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def warm_up(self) -> None:
        """Send two short requests, because the first requests of a server take longer."""
        for prompt in (list(range(100, 164)), list(range(200, 264))):
            self.post("/v1/completions", {"model": self.model, "prompt": prompt, "max_tokens": 8})

    def evictions(self) -> dict[str, int]:
        """Totals of all engines by the counter's name; of a server that ended, the last it gave.

        Those of a request's evictions are there when the request has its last token.
        """
        with contextlib.suppress(OSError):
            text = self.metrics()
            found = {
                name: total(text, f"{PREFIX}{metric}_total")
                for name, (metric, _) in COUNTERS.items()
            }
            for kind, metric, labels in (
                ("evictions", "evictions", REASONS),
                ("postponed", "postponed_evictions", CAUSES),
            ):
                for one in labels:
                    value = total(text, f"{PREFIX}{metric}_total", f'reason="{one}"')
                    found[f"{kind}_{one}"] = value
            for kind, (metric, _) in RESTORED.items():
                for tier in TIERS:
                    value = total(text, f"{PREFIX}{metric}_total", f'tier="{tier}"')
                    found[f"{kind}_{tier}"] = value
            self._totals = Counters(**{name: int(value) for name, value in found.items()})
        return self._totals.as_dict()


def total(text: str, name: str, label: str = "") -> float:
    """Sum of a metric over its labels, of those samples alone that have ``label``."""
    labels = rf"\{{.*?{re.escape(label)}.*?\}}"
    pattern = re.compile(rf"^{re.escape(name)}(?:{labels})? (\S+)$", re.MULTILINE)
    return sum(float(value) for value in pattern.findall(text))


class Watch:
    """Polls the running sequences of a server; the peak is what its memory let run at once.

    Args:
        server: The server.
        interval_s: Seconds between two polls.
        finished: Called with the number of requests that ended successfully since the last poll.

    """

    def __init__(
        self,
        server: Server,
        interval_s: float = 0.2,
        finished: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._server, self._finished = server, finished
        self._interval_s = interval_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self.peak_running = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _poll(self) -> None:
        before: float | None = None
        while not self._done.wait(self._interval_s):
            try:
                running = int(self._server.metric("vllm:num_requests_running"))
                ended = self._server.metric("vllm:request_success_total")
            except (OSError, urllib.error.URLError):
                continue
            self.peak_running = max(self.peak_running, running)
            if before is not None and ended > before:
                self._finished(int(ended - before))
            before = ended

"""A worker is killed under load; servers start and stop, idle and under load, and leave nothing."""

import json
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server import Server
from tests.e2e.faults.conftest import AMPLE_BLOCKS, AMPLE_LEN, EVICTION, PATIENCE_S, arguments
from tests.e2e.faults.processes import group, shared_memory, worker
from tests.e2e.faults.sizes import size
from tests.e2e.test_server import GREEDY, complete
from tests.models import random_prompt
from vllm_kvevict import __file__ as INIT

PROMPTS = [random_prompt(200 + 20 * n, seed=n) for n in range(6)]
ARGUMENTS = [
    *arguments(AMPLE_BLOCKS, AMPLE_LEN), *EVICTION, "--distributed-executor-backend", "mp",
]  # fmt: skip

PACKAGE = Path(INIT).parent

LEFT = 8
"""Temporary files that vLLM leaves without eviction too, each time: 7 sockets, one rendezvous."""


class Stream(threading.Thread):
    """A client of a long stream; ``ready`` once it has passed evictions in decode.

    With ``again`` it asks once more after each whole answer, until one is not whole.
    """

    def __init__(
        self,
        server: Server,
        prompt: list[int],
        tokens: int,
        again: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(daemon=True)
        body = dict(model="tiny", prompt=prompt, stream=True) | GREEDY | dict(max_tokens=tokens)
        body |= options
        self._request = urllib.request.Request(
            server.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        self.ready = threading.Event()
        self.lines: list[bytes] = []
        self.broken = False
        self._again = again
        self.start()

    def run(self) -> None:
        self._ask()
        while self._again and self.whole():
            self.lines.clear()
            self._ask()

    def _ask(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=300) as answer:
                for line in answer:
                    self.lines.append(line)
                    if len(self.lines) == 150:  # every other line is empty
                        self.ready.set()
        except (OSError, HTTPException):
            self.broken = True

    def whole(self) -> bool:
        """Whether the client can tell that its answer is whole.

        Python's client takes a connection that is closed between two chunks for the end; what
        vLLM says of a whole answer is missing then, as it is where it sends an error.
        """
        ends = b"data: [DONE]", b'"finish_reason":"length"'
        came = all(any(end in line for line in self.lines) for end in ends)
        return came and not self.broken


def streams(server: Server, tokens: int, again: bool = False) -> list[Stream]:
    """Clients under way, past evictions in decode."""
    clients = [Stream(server, prompt, tokens, again) for prompt in PROMPTS]
    assert all(client.ready.wait(300) for client in clients)
    return clients


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder for vLLM's sockets, whose paths Linux limits to 107 characters."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        yield Path(folder)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_killed_worker(tiny_model, tmp_path, short_tmp):
    env = dict(TMPDIR=str(short_tmp))
    several = [*ARGUMENTS, "--api-server-count", "2"]
    with Server(tiny_model, several, tmp_path / "killed", PATIENCE_S, env) as server:
        # Reading the maps of torch's processes takes seconds, in which a stream may end.
        mapped, victim = shared_memory(server), worker(server)
        # Where a front end waits for its turn, answers have left the engine before they arrive.
        clients = streams(server, 1500, again=True)
        victim.kill()
        for client in clients:
            client.join(60)
            assert not client.is_alive() and not client.whole()
        code = server.process.wait(60)
        ended(server)
    log = server.log.read_text()
    assert "EngineDeadError" in log and "died unexpectedly" in log
    # With one API server vLLM ends with 0 here, with and without eviction.
    assert code != 0
    assert_gone(server, mapped)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_starts_and_stops(tiny_model, tmp_path, short_tmp):
    # As users start it: each process is spawned, and imports for itself.
    env, expected = dict(TMPDIR=str(short_tmp), KVEVICT_TEST_SPAWN="1"), None
    # Without a timeout vLLM kills its engine at once, and may then wait for open streams forever.
    drains = [*ARGUMENTS, "--shutdown-timeout", "50"]
    for cycle in range(size(2, 20)):
        log_file = tmp_path / f"log-{cycle}"
        with Server(tiny_model, drains, log_file, PATIENCE_S, env) as server:
            answers = [complete(server, prompt)[0]["token_ids"] for prompt in PROMPTS[:2]]
            expected = expected or answers
            assert answers == expected
            under_load = cycle % 2 == 0
            mapped = shared_memory(server)
            clients = streams(server, 400) if under_load else []
            assert server.stop() == 0
        for client in clients:
            client.join(60)
            assert client.whole(), "requests under way are finished"
        totals = server.evictions()
        assert totals["evictions_prefill"] >= 2 and totals["evictions_decode"] >= 2
        assert totals["postponed"] == 0
        assert traces_of_ours(log_file) == []
        assert_gone(server, mapped)
        left = list(short_tmp.iterdir())
        assert all(path.is_socket() or path.name.startswith("vllm_dist_") for path in left)
        assert len(left) <= LEFT * (cycle + 2)


def traces_of_ours(log: Path) -> list[str]:
    """Lines of tracebacks that point into this package."""
    frame = f'File "{PACKAGE}'
    return [line for line in log.read_text().splitlines() if frame in line]


def ended(server: Server) -> None:
    """Wait for the last process, which tidies up what the others left."""
    deadline = time.monotonic() + 60
    while group(server):
        assert time.monotonic() < deadline, group(server)
        time.sleep(0.1)


def assert_gone(server: Server, mapped: set[Path]) -> None:
    """No process, no shared memory, nobody who listens."""
    ended(server)
    assert [path for path in mapped if path.exists()] == []
    with socket.socket() as sock:
        sock.settimeout(5)
        assert sock.connect_ex(("127.0.0.1", server.port)) != 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url + "/health", timeout=5)

"""Step times of running requests, and /health, while stores are written to files and read.

    python -m benchmarks.store_traffic --folder FOLDER

16 clients stream without eviction. At the same time another client asks about one document after
another, first without files (the baseline), then with ``--kv-eviction-store-path``, so that every
document's store is written, and then again, so that every store is read. The model has random
weights and large keys and values, so that a store takes megabytes and its prompt little time. A
step's time is the time between two tokens of a stream, as a client sees it.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.server import Server
from benchmarks.tiny_model import random_prompt, tiny_llama

STREAMS = 16
STREAM_TOKENS = 732
WARM_UP = 2
"""Documents of other clients before anything is measured."""
DOCUMENT_TOKENS = 1024
QUESTION_TOKENS = 8
LAYERS, KV_HEADS, HEAD_SIZE = 4, 8, 128
BUDGET = "50%"
TOKEN_BYTES = LAYERS * KV_HEADS * HEAD_SIZE * 2 * 4
"""Layers, heads, head size, K and V, float32."""
STORE_BYTES = DOCUMENT_TOKENS // 2 * TOKEN_BYTES
"""Approximate bytes of a store."""
FREE_DOCUMENTS = 9
"""Documents that the KV cache holds in addition to the streams."""
MEMORY_BYTES = (STREAMS * STREAM_TOKENS + FREE_DOCUMENTS * DOCUMENT_TOKENS) * TOKEN_BYTES
HEALTH_LIMIT_MS = 100.0
STEP_LIMIT = 2.0
"""Longest step in medians."""


def post(server: Server, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(dict(model="m", temperature=0, ignore_eos=True) | body).encode(),
        {"Content-Type": "application/json"},
    )


class Watch:
    """Clients of streams and of /health; keeps how long each token and each answer took."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._end = threading.Event()
        self.gaps: list[float] = []
        self.health: list[float] = []
        self.started = threading.Semaphore(0)
        self._errors: list[BaseException] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the clients in this context.

        Raises:
            RuntimeError: A client failed, so that the measurements do not count.

        """
        work: list[Callable[[], None]] = [self._ask_health]
        work += [lambda seed=seed: self._stream(seed) for seed in range(STREAMS)]  # type: ignore
        threads = [threading.Thread(target=self._run, args=(one,), daemon=True) for one in work]
        for thread in threads:
            thread.start()
        try:
            for _ in range(STREAMS):
                self.started.acquire()
            self._check()
            yield
        finally:
            self._end.set()
            for thread in threads:
                thread.join()
        self._check()

    def _run(self, client: Callable[[], None]) -> None:
        try:
            client()
        except BaseException as error:
            self._errors.append(error)
            self.started.release(STREAMS)

    def _check(self) -> None:
        if self._errors:
            raise RuntimeError("a client of the benchmark failed") from self._errors[0]

    def _stream(self, seed: int) -> None:
        first = True
        while not self._end.is_set():
            body = dict(
                prompt=random_prompt(32, seed), max_tokens=STREAM_TOKENS - 32, stream=True,
                vllm_xargs={"kv_eviction": "none"},
            )  # fmt: skip
            with urllib.request.urlopen(post(self._server, body), timeout=600) as answer:
                last = None
                for line in answer:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps.append(now - last)
                    if first and last is not None:
                        self.started.release()
                        first = False
                    last = now
                    if self._end.is_set():
                        return

    def _ask_health(self) -> None:
        while not self._end.wait(0.02):
            start = time.perf_counter()
            with urllib.request.urlopen(self._server.url + "/health", timeout=60) as answer:
                answer.read()
            self.health.append(time.perf_counter() - start)

    def phase(self, work: Callable[[], None]) -> dict[str, float]:
        """Do something, and return what was measured meanwhile, in ms."""
        gaps, health, start = len(self.gaps), len(self.health), time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        steps = sorted(1000 * gap for gap in self.gaps[gaps:])
        waits = [1000 * wait for wait in self.health[health:]]
        if not steps or not waits:
            raise SystemExit("a phase was too short to measure a step; use more --gigabytes")
        return {
            "seconds": round(seconds, 1),
            "steps": len(steps) // STREAMS,
            "step_p50_ms": round(statistics.median(steps), 1),
            "step_p99_ms": round(steps[int(0.99 * len(steps))], 1),
            "step_max_ms": round(steps[-1], 1),
            "health_p50_ms": round(statistics.median(waits), 1),
            "health_max_ms": round(max(waits), 1),
        }


def ask_all(server: Server, documents: int, first: int = 0) -> None:
    """Ask about every document, one after the other."""
    for seed in range(first, first + documents):
        prompt = random_prompt(DOCUMENT_TOKENS, 1000 + seed) + random_prompt(QUESTION_TOKENS, seed)
        asked = dict(
            kv_eviction_at=DOCUMENT_TOKENS, kv_eviction_interval=0, kv_eviction_budget=BUDGET
        )
        body = dict(prompt=prompt, max_tokens=1, vllm_xargs=asked)
        with urllib.request.urlopen(post(server, body), timeout=600) as answer:
            answer.read()


def warm_up(server: Server, documents: int) -> None:
    """Ask about documents that are not measured: a server's first evictions take longer."""
    ask_all(server, WARM_UP, first=documents)


def turn_over(server: Server) -> None:
    """Fill the KV cache with other prompts, so that all stores must be read from files."""
    for seed in range(FREE_DOCUMENTS + 2):
        prompt = random_prompt(DOCUMENT_TOKENS, 500_000 + seed)
        body = dict(prompt=prompt, max_tokens=1, vllm_xargs={"kv_eviction": "none"})
        with urllib.request.urlopen(post(server, body), timeout=600) as answer:
            answer.read()


def wait_written(folder: Path, documents: int, patience_s: float = 120) -> int:
    """Wait until a file of every document is there; returns the bytes of all files."""
    deadline = time.monotonic() + patience_s
    while True:
        sizes = [path.stat().st_size for path in folder.glob("*/[0-9a-f]*.safetensors")]
        if len(sizes) >= documents:
            return sum(sizes)
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(sizes)} of {documents} stores were written")
        time.sleep(0.1)


def measure(model: Path, folder: Path, documents: int, arguments: list[str]) -> dict[str, Any]:
    """Measure all phases on two servers."""
    found: dict[str, Any] = {}
    with Server(model, arguments, folder / "log") as server:
        warm_up(server, documents)
        watch = Watch(server)
        with watch.watching():
            found["streams alone"] = watch.phase(lambda: time.sleep(10))
            found["documents without files"] = watch.phase(lambda: ask_all(server, documents))
    stores = folder / "stores"
    options = [*arguments, "--kv-eviction-store-path", str(stores)]
    with Server(model, options, folder / "log-files") as server:
        warm_up(server, documents)
        watch = Watch(server)

        def write() -> None:
            ask_all(server, documents)
            found["bytes_written"] = wait_written(stores, WARM_UP + documents)

        with watch.watching():
            found["streams alone, with files"] = watch.phase(lambda: time.sleep(10))
            found["documents that are written"] = watch.phase(write)
            turn_over(server)
            found["documents that are read"] = watch.phase(lambda: ask_all(server, documents))
        counted = server.evictions()
        found["stores_read"] = counted["stores_restored_file"]
        found["bytes_read"] = counted["bytes_restored_file"]
    if found["stores_read"] < documents:
        raise SystemExit(
            f"only {found['stores_read']} of {documents} stores were read from files: the KV cache "
            "still had the others, or reading them failed"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store_traffic",
        description="Step times and /health while stores are written and read.",
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="written, and then read")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    given = parser.parse_args()
    documents = max(6, round(given.gigabytes * 1e9 / STORE_BYTES))
    arguments = [
        "--served-model-name", "m", "--enforce-eager", "--dtype", "float32", "--seed", "0",
        "--max-model-len", "2048", "--block-size", "32", "--max-num-seqs", str(STREAMS + 2),
        "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(MEMORY_BYTES),
        "--kv-eviction", "ada-snapkv", "--kv-eviction-allow", "none",
    ]  # fmt: skip
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        model = tiny_llama(
            folder / "model", layers=LAYERS, heads=KV_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_SIZE
        )
        found = measure(model, folder, documents, arguments)
    read = found["documents that are read"]
    written = found["documents that are written"]
    found["health_is_fast"] = max(p["health_max_ms"] for p in (read, written)) < HEALTH_LIMIT_MS
    found["steps_are_fast"] = all(
        phase["step_max_ms"] <= STEP_LIMIT * phase["step_p50_ms"] for phase in (read, written)
    )
    result = dict(documents=documents, server=arguments, **found, provenance=provenance())
    text = json.dumps(result, indent=1)
    if given.output is not None:
        given.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

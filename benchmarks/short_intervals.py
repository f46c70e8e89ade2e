"""Cost of 16 clients with the shortest interval that a server allows for a seventeenth client.

    python -m benchmarks.short_intervals

The server evicts once (``--kv-eviction-interval 0``) and caps budgets, so that every eviction of an
answer is a client's choice. In rounds that alternate, the 16 clients stream with the server's
settings and with the shortest interval; the seventeenth streams without settings of its own, and
its time per output token (TPOT) is measured. The model has random weights and is small, so that an
eviction takes a larger part of a step than on a real one. ``--trusted`` starts the server without
the cap, and the clients then ask for an eviction with every block.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.server import Server
from benchmarks.tiny_model import cached_tiny_llama, random_prompt

RESULT = Path(__file__).parent / "results" / "short_intervals.json"
CLIENTS = 16
BUDGET, WINDOW = 2048, 32
SHORTEST = 4 * WINDOW
PROMPT_TOKENS = BUDGET + 152
MEASURED_TOKENS = 256
CLIENT_TOKENS = MEASURED_TOKENS + 1000
"""More than the seventeenth client gets while they stream."""
LONGEST = 4096
LIMIT = 1.3
FLAGS = [
    "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", str(LONGEST),
    "--max-num-seqs", str(2 * CLIENTS), "--kv-cache-memory-bytes", "1G",
    "--no-enable-prefix-caching", "--kv-eviction", "snapkv", "--kv-eviction-budget", str(BUDGET),
    "--kv-eviction-window", str(WINDOW), "--kv-eviction-interval", "0",
]  # fmt: skip


def stream(server: Server, prompt: list[int], tokens: int, asked: dict[str, Any]) -> Iterator[None]:
    """Yield when a token of an answer arrives."""
    body = dict(model=server.model, prompt=prompt, max_tokens=tokens, stream=True)
    body |= dict(temperature=0, ignore_eos=True, vllm_xargs=asked)
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield


def tpot(server: Server, number: int, asked: dict[str, Any]) -> dict[str, float]:
    """Return the TPOT of the seventeenth client in ms, and what was evicted meanwhile.

    Args:
        server: The server.
        number: Number of the round; prompts differ between rounds.
        asked: Settings of the 16 clients.

    Raises:
        RuntimeError: A client failed or ended early.

    """
    end, began = threading.Event(), threading.Semaphore(0)
    problems: list[BaseException] = []

    def client(index: int) -> None:
        try:
            prompt = random_prompt(PROMPT_TOKENS, 100 * number + index)
            for token, _ in enumerate(stream(server, prompt, CLIENT_TOKENS, asked)):
                if token == 0:
                    began.release()
                if end.is_set():
                    return
            raise RuntimeError("a client's answer ended before the measurement")
        except BaseException as error:
            problems.append(error)
            began.release()

    threads = [threading.Thread(target=client, args=(index,)) for index in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            began.acquire()
        before = server.evictions()["evictions_decode"]
        prompt = random_prompt(64, 100 * number + CLIENTS)
        times = [time.perf_counter() for _ in stream(server, prompt, MEASURED_TOKENS, {})]
        evictions = server.evictions()["evictions_decode"] - before
    finally:
        end.set()
        for thread in threads:
            thread.join()
    if problems:
        raise RuntimeError("a client of the benchmark failed") from problems[0]
    if len(times) < MEASURED_TOKENS // 2:
        raise RuntimeError(f"{len(times)} pieces for {MEASURED_TOKENS} tokens")
    took = 1000 * (times[-1] - times[0]) / (MEASURED_TOKENS - 1)
    return {"tpot_ms": round(took, 3), "evictions": evictions}


def measure(server: Server, rounds: int, interval: int) -> dict[str, Any]:
    """Return both arms, and the ratio of their TPOT, over rounds that alternate."""
    asked: dict[str, dict[str, Any]] = {
        "evict_once": {},
        "shortest_interval": {"kv_eviction_interval": interval},
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in asked}
    tpot(server, 0, asked["shortest_interval"])  # The first round of a server takes longer.
    for number in range(1, rounds + 1):
        # Which arm comes first changes, so that a drift of the machine favours none.
        for name in list(asked)[:: 1 if number % 2 else -1]:
            found[name].append(tpot(server, 2 * number + (name == "evict_once"), asked[name]))
            print(f"round {number}: {name:18}{found[name][-1]}", flush=True)
    pairs = zip(found["shortest_interval"], found["evict_once"], strict=True)
    ratios = sorted(short["tpot_ms"] / once["tpot_ms"] for short, once in pairs)
    assert all(one["evictions"] >= CLIENTS for one in found["shortest_interval"])
    assert not any(one["evictions"] for one in found["evict_once"])
    medians = {
        name: statistics.median(one["tpot_ms"] for one in rows) for name, rows in found.items()
    }
    return {
        "rounds": found,
        "median_tpot_ms": medians,
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_min_max": [round(ratios[0], 3), round(ratios[-1], 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="pairs of rounds (default: 9)")
    parser.add_argument("--trusted", action="store_true", help="no --kv-eviction-max-budget")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    model, flags, interval = cached_tiny_llama(max_len=LONGEST), list(FLAGS), 1
    if not options.trusted:
        flags += ["--kv-eviction-max-budget", str(BUDGET)]
        interval = SHORTEST
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(model, flags, Path(folder) / "log") as server,
    ):
        found = measure(server, options.rounds, interval)
        load = dict(
            clients=CLIENTS, prompt_tokens=PROMPT_TOKENS, interval=interval,
            measured_tokens=MEASURED_TOKENS,
        )  # fmt: skip
        report = {"provenance": provenance(), "load": load} | found
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    ratio = report["ratio_median"]
    print(f"TPOT of the seventeenth client: {ratio:.3f}x ({report['ratio_min_max']})")
    print(f"written to {options.output}")
    if not options.trusted and ratio >= LIMIT:
        raise SystemExit(f"the ratio is not below {LIMIT}")


if __name__ == "__main__":
    main()

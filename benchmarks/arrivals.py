"""CPU time of the engine's thread when a tiny request arrives, for every combination of keys.

    python -m benchmarks.arrivals

Requests of two tokens name every key of KV eviction at its bounds, in combination, and the longest
answer that the server allows. What is remembered of the rules of earlier requests is forgotten
before each. Measured is the CPU time of the engine's thread in ``add_request`` and in the step that
admits the request, without a model: the least of three. Layers form six groups.
"""

import argparse
import gc
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

RESULTS = Path(__file__).parent / "results"
LIMIT_MS = 2.0
PROMPT = (7, 8)
SHARES = (2.0, 1.5, 1.1, 0.7, 0.4, 0.3)
WINDOW, BLOCK = 32, 16
SERVERS: dict[str, dict[str, Any]] = {
    "every 128": dict(every=128),
    "every 128, int4": dict(every=128, store_dtype="int4"),
    "intervals": dict(),
    "prompts in parts": dict(prefill_interval=128),
}
LONGEST = (131_072, 1_048_576)


def bounds(key: str) -> list[Any]:
    """Values of a key near its bounds; None omits it.

    Raises:
        KeyError: The key is not known here.

    """
    numbers = [None, 0, 1, 4 * WINDOW, 10**6]
    return {
        "kv_eviction": [None, "none"],
        "kv_eviction_budget": [None, "0.01%", "50%", "99.9%", "99.99%", "99.9999%", 33, 10**6],
        "kv_eviction_interval": numbers,
        "kv_eviction_prefill_interval": numbers,
        "kv_eviction_every": numbers,
        "kv_eviction_protect_first": [None, 2],
        "kv_eviction_when": [None, "pressure"],
        "kv_eviction_at": [None, 1],
    }[key]


def wishes() -> Iterator[dict[str, Any]]:
    """Yield all combinations of the bounds of all keys."""
    from vllm_kvevict.config.requests import KEYS

    for values in itertools.product(*map(bounds, KEYS)):
        yield {key: value for key, value in zip(KEYS, values, strict=True) if value is not None}


def forget() -> None:
    """Forget what is remembered of the rules of earlier requests."""
    from vllm_kvevict.rules import layers, positions, progress

    for module in (layers, positions, progress):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def accepted(scheduler: Any, asked: dict[str, Any]) -> bool:
    """Return whether an API server would let the keys through."""
    from vllm_kvevict.config.requests import parse_options

    table = scheduler._table
    try:
        parse_options(table.config, asked, len(PROMPT), list(table.rules.values()))
    except ValueError:
        return False
    return True


def cost(scheduler: Any, setup: Any, number: int, longest: int, asked: dict[str, Any]) -> float:
    """Return the milliseconds of the engine's thread for a request that arrives and starts."""
    from vllm.v1.request import RequestStatus

    from benchmarks.bare_scheduler import make_request

    times = []
    for attempt in range(3):
        forget()
        name = f"{number}-{attempt}"
        request = make_request(setup, name, list(PROMPT), longest - len(PROMPT), asked)
        start = time.thread_time()
        scheduler.add_request(request)
        output = scheduler.schedule()
        times.append(time.thread_time() - start)
        assert name in output.num_scheduled_tokens
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        scheduler.schedule()
    return min(times) * 1e3


def measure(flags: dict[str, Any], longest: int, step: int) -> dict[str, Any]:
    """Return the costs under one server's flags, of every ``step``-th combination of keys."""
    from benchmarks.bare_scheduler import Setup, make_scheduler

    setup = Setup(
        budget=1024 if "prefill_interval" in flags else "25%",
        window=WINDOW,
        interval=128,
        block_size=BLOCK,
        pyramid=len(SHARES),
        shares=SHARES,
        blocks=2 + len(SHARES) * longest // BLOCK,
        longest=longest,
        **flags,
    )
    scheduler = make_scheduler(setup)
    found: list[tuple[float, dict[str, Any]]] = []
    gc.collect()
    gc.disable()
    try:
        for number, asked in enumerate(wishes()):
            if number % step == 0 and accepted(scheduler, asked):
                took = cost(scheduler, setup, number, longest, asked)
                found.append((took, asked))
    finally:
        gc.enable()
    found.sort(key=lambda one: -one[0])
    plain = cost(scheduler, setup, -1, longest, {})
    return {
        "requests": len(found),
        "without_keys_ms": round(plain, 3),
        "median_ms": round(found[len(found) // 2][0], 3),
        "most_ms": round(found[0][0], 3),
        "most_for": found[0][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", type=int, default=1, help="Measure every so many combinations.")
    parser.add_argument("--output", type=Path, default=RESULTS / "arrivals.json")
    options = parser.parse_args()
    report: dict[str, Any] = {"provenance": provenance(), "limit_ms": LIMIT_MS}
    for (name, flags), longest in itertools.product(SERVERS.items(), LONGEST):
        row = report[f"{name}, {longest} tokens"] = measure(flags, longest, options.step)
        print(f"{name}, {longest} tokens: {row}", flush=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()

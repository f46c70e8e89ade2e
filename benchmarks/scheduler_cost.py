"""What eviction costs the scheduler per step: vLLM's own and ours under the same load.

    python -m benchmarks.scheduler_cost
    python -m benchmarks.scheduler_cost --waiting 500

256 and 1024 running decodes, no model: CPU time of the thread in ``schedule`` plus
``update_from_output``. All schedulers run in lock step in one process, so that ratios mean
something on a busy machine.
"""

import argparse
import gc
import json
import random
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.provenance import provenance

RESULTS = Path(__file__).parent / "results"
PROMPTS = range(512, 768)


class Load:
    """One scheduler with its running requests and the seconds it took, step by step."""

    def __init__(self, scheduler: Any, setup: Any, requests: int, max_tokens: int) -> None:
        from benchmarks.bare_scheduler import make_request

        self.scheduler = scheduler
        self.setup = setup
        self.seconds: list[float] = []
        rng = random.Random(0)
        for index in range(requests):
            prompt = [rng.randrange(2, 1000) for _ in range(rng.choice(PROMPTS))]
            scheduler.add_request(make_request(setup, f"r{index}", prompt, max_tokens))

    def step(self, token: int) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        start = time.thread_time()
        output = self.scheduler.schedule()
        took = time.thread_time() - start
        ids = list(output.num_scheduled_tokens)
        sampled = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[
                [] if self.scheduler.requests[request_id].is_prefill_chunk else [token]
                for request_id in ids
            ],
        )
        start = time.thread_time()
        self.scheduler.update_from_output(output, sampled)
        self.seconds.append(took + time.thread_time() - start)


class HangingFiles:
    """A folder of stores in which every file takes for ever to read."""

    def __init__(self) -> None:
        self.back = threading.Event()

    def read(self, *args: Any) -> Any:
        self.back.wait()
        raise FileNotFoundError

    def present(self, *args: Any) -> set[str]:
        return set()


class MissingFiles(HangingFiles):
    """A folder without a file."""

    def __init__(self) -> None:
        super().__init__()
        self.back.set()


RINGS = 64
"""Ring slots that 512 MiB hold for an 8B model."""
LIMITS = dict(evicting=1.10, evicting_64_slots=1.10, evicted_once=1.05, never_evicts=1.05)
WAITING_LIMIT = 1.02
"""Median of a step with documents that wait, relative to one without."""
DOCUMENT_TOKENS = 1024
WARM_UP = 100
"""Steps in which all waiting documents are examined, before any is measured."""
ROUNDS = 8
"""Rounds in which documents wait, at the one scheduler and at the other in turn."""


def schedulers(requests: int, max_tokens: int, asynchronous: bool) -> dict[str, Load]:
    """vLLM's scheduler; ours evicting, and ours with nothing due, after an eviction or before."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from benchmarks.bare_scheduler import (
        Setup,
        base_config,
        kv_cache_config,
        make_scheduler,
        vllm_config,
    )

    length = PROMPTS.stop + max_tokens
    setup = Setup(
        budget=256,
        window=32,
        interval=128,
        block_size=16,
        blocks=requests * (length // 16 + 32),
        max_num_seqs=requests,
        max_batched=requests * PROMPTS.stop,
        asynchronous=asynchronous,
    )
    never = replace(setup, budget=10**6)
    plain = (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config(setup), kv_cache_config(setup, evictable=False), base_config()[1], block_size=16
    )
    made = {
        "vllm": plain,
        "evicting": make_scheduler(setup),
        "evicting_64_slots": make_scheduler(replace(setup, rings=RINGS)),
        "evicted_once": make_scheduler(replace(setup, interval=0)),
        "never_evicts": make_scheduler(never),
    }
    return {name: Load(made[name], setup, requests, max_tokens) for name in made}


def in_lock_step(loads: dict[str, Load], steps: int) -> None:
    """Run all schedulers a step each, in another order every step, without garbage collection."""
    rng, names = random.Random(1), list(loads)
    gc.collect()
    gc.disable()
    try:
        for step in range(steps):
            rng.shuffle(names)
            for name in names:
                loads[name].step(2 + step % 900)
    finally:
        gc.enable()


def measure(requests: int, steps: int, asynchronous: bool) -> dict[str, Any]:
    """Microseconds a decode step of every scheduler, and the ratios to vLLM's."""
    loads = schedulers(requests, steps + 2, asynchronous)
    for load in loads.values():
        load.step(2)
        assert len(load.scheduler.running) == requests, "the prefill takes one step"
        load.seconds.clear()
    in_lock_step(loads, steps)
    result: dict[str, Any] = {}
    for name, load in loads.items():
        result[name] = {
            "mean_us": round(statistics.fmean(load.seconds) * 1e6, 1),
            "median_us": round(statistics.median(load.seconds) * 1e6, 1),
            "p99_us": round(statistics.quantiles(load.seconds, n=100)[98] * 1e6, 1),
        }
        if name != "vllm":
            result[name]["counters"] = load.scheduler.eviction_counters.as_dict()
            for kind in ("mean_us", "median_us"):
                result[name][f"ratio_{kind[:-3]}"] = round(
                    result[name][kind] / result["vllm"][kind], 3
                )
    assert result["evicting"]["counters"]["evictions_decode"] > 0
    assert result["evicted_once"]["counters"]["evictions_prefill"] == requests
    assert result["never_evicts"]["counters"]["evictions"] == 0
    return result


def twins(requests: int, steps: int, asynchronous: bool) -> list[Load]:
    """Two equal schedulers with a folder of stores and the same running requests."""
    from benchmarks.bare_scheduler import Setup, make_scheduler

    length = PROMPTS.stop + steps + 2
    setup = Setup(
        budget=256,
        window=32,
        interval=128,
        block_size=16,
        blocks=requests * (length // 16 + 32),
        max_num_seqs=requests + 64,
        max_batched=requests * PROMPTS.stop,
        asynchronous=asynchronous,
        memory=1,
    )
    loads = [Load(make_scheduler(setup), setup, requests, steps + 2) for _ in range(2)]
    for load in loads:
        load.step(2)
        assert len(load.scheduler.running) == requests, "the prefill takes one step"
    return loads


def round_ratio(loads: list[Load], case: str, number: int, waiting: int, steps: int) -> float:
    """Return the median ratio of a step with documents that wait to one of the other scheduler.

    Args:
        loads: The two schedulers.
        case: "nobody", "files" or "claims".
        number: Number of the round; it chooses the documents, and where they wait.
        waiting: Number of documents.
        steps: Number of steps that are measured.

    """
    from vllm.v1.request import RequestStatus

    from benchmarks.bare_scheduler import make_request
    from vllm_kvevict.config.handover import TAKEN_OVER

    busy, other = loads[:: 1 if number % 2 else -1]
    files = MissingFiles() if case == "claims" else HangingFiles()
    busy.scheduler._stores.reads.files = files
    rng = random.Random(number)
    names = [f"{case}{number}-{index}" for index in range(waiting if case != "nobody" else 0)]
    for name in names:
        document = [rng.randrange(2, 1000) for _ in range(DOCUMENT_TOKENS)]
        asked = {"kv_eviction_at": DOCUMENT_TOKENS - 64, "kv_eviction_interval": 0}
        request = make_request(busy.setup, name, document, 2, asked)
        if case == "claims":
            request.kv_transfer_params = TAKEN_OVER
        busy.scheduler.add_request(request)
    for _ in range(WARM_UP):
        for load in loads:
            load.step(2)
        # Threads find that the claimed files are missing.
        time.sleep(0.002)
    assert len(busy.scheduler._stores.reads.late) == (waiting if case == "claims" else 0)
    for load in loads:
        load.seconds.clear()
    in_lock_step(dict(enumerate(loads)), steps)
    assert len(busy.scheduler.waiting) == len(names), "documents wait, and nobody else"
    # Pairs of one step: the load of the machine is the same for both.
    pairs = zip(busy.seconds, other.seconds, strict=True)
    ratio = statistics.median(one / base for one, base in pairs)
    files.back.set()
    busy.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    return ratio


def measure_waiting(requests: int, waiting: int, steps: int, asynchronous: bool) -> dict[str, Any]:
    """Time that waiting documents add to a step, as ratios between two equal schedulers.

    Nobody waits (the error of the method); documents wait for files; their clients claim that
    another server computes them. Two equal schedulers differ by several percent, according to where
    their objects are in memory. So the documents wait at each of them in turn, and the geometric
    mean of two such rounds is free of the difference.
    """
    from vllm_kvevict.engine import store_reads

    cases = ("nobody", "files", "claims")
    total = len(cases) * ROUNDS * (steps + WARM_UP)
    loads = twins(requests, total, asynchronous)
    found: dict[str, list[float]] = {case: [] for case in cases}
    # Nobody gives up while this measures.
    with mock.patch.multiple(store_reads, READ_TIMEOUT_S=1e6, HANDOVER_TIMEOUT_S=1e6):
        for number in range(len(cases) * ROUNDS):
            # All cases at the one scheduler, then all at the other.
            case = cases[number // 2 % len(cases)]
            found[case].append(round_ratio(loads, case, number, waiting, steps))
    result: dict[str, Any] = {"median_us": round(statistics.median(loads[0].seconds) * 1e6, 1)}
    for case, ratios in found.items():
        pairs = [statistics.geometric_mean(ratios[at : at + 2]) for at in range(0, ROUNDS, 2)]
        result[case] = {
            "waiting": 0 if case == "nobody" else waiting,
            "ratio": round(statistics.median(pairs), 4),
            "ratio_min_max": [round(min(pairs), 4), round(max(pairs), 4)],
        }
    for load in loads:
        assert len(load.scheduler.running) == requests
        assert load.scheduler.eviction_counters.as_dict()["evictions_decode"] > 0
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=288)
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    named = "scheduler_waiting.json" if options.waiting else "scheduler_cost.json"
    output = options.output or RESULTS / named
    report: dict[str, Any] = {
        "provenance": provenance(),
        "load": {
            "running_requests": options.requests,
            "decode_steps": options.steps,
            "block_size": 16,
            "prompt_tokens": [PROMPTS.start, PROMPTS.stop - 1],
            "budget": 256,
            "window": 32,
            "interval": 128,
            "waiting_documents": options.waiting,
        },
    }
    for requests in options.requests:
        for kind, asynchronous in (("sync", False), ("async", True)):
            print(f"{requests} running, {kind} scheduler", flush=True)
            if options.waiting:
                found = measure_waiting(requests, options.waiting, options.steps, asynchronous)
                report[f"{requests}_{kind}"] = found
                for name in ("nobody", "files", "claims"):
                    ratio, spread = found[name]["ratio"], found[name]["ratio_min_max"]
                    print(f"  {name:20}{ratio:.4f} (<= {WAITING_LIMIT}) {spread}")
                continue
            found = measure(requests, options.steps, asynchronous)
            report[f"{requests}_{kind}"] = found
            for name, row in found.items():
                ratio = f"{row['ratio_mean']:.3f} (<= {LIMITS[name]})" if name in LIMITS else ""
                print(f"  {name:20}{row['mean_us']:10}{row['median_us']:10} us  {ratio}")
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {output}")


if __name__ == "__main__":
    main()

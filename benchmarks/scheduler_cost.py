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
WARM_UP = 200
"""Steps in which all waiting documents are examined, before any is measured."""


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


def with_documents(requests: int, waiting: int, asynchronous: bool, steps: int) -> dict[str, Load]:
    """Schedulers with a folder of stores: nobody waits; documents wait for files; their clients
    claim that another server computes them."""
    from benchmarks.bare_scheduler import Setup, make_request, make_scheduler
    from vllm_kvevict.config.handover import TAKEN_OVER

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
    loads = {}
    rng = random.Random(2)
    for name in ("nobody", "files", "claims"):
        loads[name] = load = Load(make_scheduler(setup), setup, requests, steps + 2)
        stores = load.scheduler._stores
        stores.reads.files = MissingFiles() if name == "claims" else HangingFiles()
        load.step(2)
        for index in range(waiting if name != "nobody" else 0):
            document = [rng.randrange(2, 1000) for _ in range(DOCUMENT_TOKENS)]
            asked = {"kv_eviction_at": DOCUMENT_TOKENS - 64, "kv_eviction_interval": 0}
            request = make_request(setup, f"d{index}", document, 2, asked)
            if name == "claims":
                request.kv_transfer_params = TAKEN_OVER
            load.scheduler.add_request(request)
        for _ in range(WARM_UP):
            load.step(2)
            # Threads find that the claimed files are missing.
            time.sleep(0.001)
        assert len(stores.reads.late) == (waiting if name == "claims" else 0)
        load.seconds.clear()
    return loads


def measure_waiting(requests: int, waiting: int, steps: int, asynchronous: bool) -> dict[str, Any]:
    """Microseconds of a step with and without documents that wait, and the ratios of medians."""
    from vllm_kvevict.engine import store_reads

    # Nobody gives up while this measures.
    patience = mock.patch.multiple(store_reads, READ_TIMEOUT_S=1e6, HANDOVER_TIMEOUT_S=1e6)
    with patience:
        loads = with_documents(requests, waiting, asynchronous, steps + WARM_UP)
        in_lock_step(loads, steps)
    result: dict[str, Any] = {}
    for name, load in loads.items():
        waits = len(load.scheduler.waiting)
        assert len(load.scheduler.running) == requests
        assert waits == (0 if name == "nobody" else waiting), "documents wait, and nobody else"
        assert load.scheduler.eviction_counters.as_dict()["evictions_decode"] > 0
        median = statistics.median(load.seconds)
        result[name] = {"median_us": round(median * 1e6, 1), "waiting": waits}
        if name != "nobody":
            # Pairs of one step: the load of the machine is the same for both.
            pairs = zip(load.seconds, loads["nobody"].seconds, strict=True)
            base = statistics.median(loads["nobody"].seconds)
            result[name]["ratio_of_medians"] = round(median / base, 4)
            result[name]["median_of_ratios"] = round(statistics.median(a / b for a, b in pairs), 4)
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
                for name, row in found.items():
                    ratio = f"{row.get('ratio_of_medians', 1):.3f} (<= {WAITING_LIMIT})"
                    print(f"  {name:20}{row['median_us']:10} us  {ratio}")
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

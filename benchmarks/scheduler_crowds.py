"""What crowds cost the scheduler per step: requests that wait for one store, groups of layers.

    python -m benchmarks.scheduler_crowds

Two loads beside those of :mod:`benchmarks.scheduler_cost`, measured as there (CPU time of the
thread in ``schedule`` plus ``update_from_output``, all schedulers in lock step, no model):

- ``waiting``: 256 running decodes while 1,000 requests wait and places are free. Ours wait for one
  context that is being prepared; vLLM's for a grammar that is being compiled, which it skips the
  same way.
- ``groups``: 256 running decodes with shares of layers in 8 groups, more requests waiting for
  places, so that admissions ask for the forecast. vLLM's scheduler has 8 groups of the same shape.
"""

import argparse
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.scheduler_cost import Load, in_lock_step

RESULT = Path(__file__).parent / "results" / "scheduler_crowds.json"
RUNNING, WAITING, GROUPS = 256, 1000, 8
LIMIT = 1.10


def setup_of(asynchronous: bool) -> Any:
    from benchmarks.bare_scheduler import Setup

    return Setup(
        budget=256,
        window=32,
        interval=128,
        block_size=16,
        blocks=RUNNING * 120,
        max_num_seqs=RUNNING + WAITING,
        # Tokens are left for those who wait, and the long prompt takes 64 a step.
        max_batched=RUNNING + 512,
        long_prefill=64,
        asynchronous=asynchronous,
        longest=8192,
    )


def waiting(asynchronous: bool) -> dict[str, Load]:
    """Schedulers with 1,000 requests that wait behind 256 running ones."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    from benchmarks.bare_scheduler import (
        base_config,
        kv_cache_config,
        make_request,
        make_scheduler,
        vllm_config,
    )

    setup = setup_of(asynchronous)
    plain = (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config(setup), kv_cache_config(setup, evictable=False), base_config()[1], block_size=16
    )
    loads = {
        "vllm": Load(plain, setup, RUNNING, 1000),
        "ours": Load(make_scheduler(setup), setup, RUNNING, 1000),
    }
    for load in loads.values():
        while any(request.is_prefill_chunk for request in load.scheduler.running) or (
            load.scheduler.waiting
        ):
            load.step(2)
    rng = random.Random(2)
    context = [rng.randrange(2, 1000) for _ in range(7000)]
    text = [rng.randrange(2, 1000) for _ in range(1000)]
    asked = {"kv_eviction_at": 7000, "kv_eviction_prepare": text}
    for index in range(WAITING):
        question = [rng.randrange(2, 1000) for _ in range(8)]
        for name, load in loads.items():
            extra = asked if name == "ours" else None
            request = make_request(setup, f"w{index}", context + question, 4, asked=extra)
            if name == "vllm":
                request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            load.scheduler.add_request(request)
    # What reads the context is computed by vLLM's scheduler, too: 64 tokens a step beside the rest.
    reader = make_request(setup, "reader", context + text, 2)
    loads["vllm"].scheduler.add_request(reader)
    return loads


def groups(asynchronous: bool) -> dict[str, Load]:
    """Schedulers with 8 groups of layers and more requests than places."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from benchmarks.bare_scheduler import base_config, kv_cache_config, make_scheduler, vllm_config

    shares = (2.2, 1.6, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2)
    setup = replace(
        setup_of(asynchronous),
        pyramid=GROUPS,
        shares=shares,
        blocks=RUNNING * 120 * GROUPS,
        max_num_seqs=RUNNING,
        max_batched=8192,
    )
    stock = kv_cache_config(setup, evictable=False)
    stock.kv_cache_groups = [
        replace(stock.kv_cache_groups[0], layer_names=[f"layer.{index}"]) for index in range(GROUPS)
    ]
    plain = (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config(setup), stock, base_config()[1], block_size=16
    )
    loads = {
        "vllm": Load(plain, setup, RUNNING + 64, 1000),
        "ours": Load(make_scheduler(setup), setup, RUNNING + 64, 1000),
    }
    for load in loads.values():
        while len(load.scheduler.running) < RUNNING or any(
            request.is_prefill_chunk for request in load.scheduler.running
        ):
            load.step(2)
    return loads


def measure(loads: dict[str, Load], steps: int) -> dict[str, Any]:
    """Microseconds a step of each scheduler, and the ratio of their means and medians."""
    for load in loads.values():
        load.seconds.clear()
    in_lock_step(loads, steps)
    ours = loads["ours"].scheduler
    means = {name: 1e6 * statistics.fmean(load.seconds) for name, load in loads.items()}
    medians = {name: 1e6 * statistics.median(load.seconds) for name, load in loads.items()}
    return {
        "mean_us": {name: round(value, 1) for name, value in means.items()},
        "median_us": {name: round(value, 1) for name, value in medians.items()},
        "ratio_mean": round(means["ours"] / means["vllm"], 3),
        "ratio_median": round(medians["ours"] / medians["vllm"], 3),
        "running": len(ours.running),
        "waiting": sum(ours.get_request_counts()) - len(ours.running),
        "counters": ours.eviction_counters.as_dict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    report: dict[str, Any] = {"provenance": provenance(), "limit": LIMIT}
    for kind, asynchronous in (("sync", False), ("async", True)):
        for name, make in (("waiting", waiting), ("groups", groups)):
            found = report[f"{name}_{kind}"] = measure(make(asynchronous), options.steps)
            print(
                f"{name}, {kind}: {found['mean_us']} us, {found['ratio_mean']} "
                f"(median {found['ratio_median']}), at most {LIMIT}",
                flush=True,
            )
    assert report["waiting_sync"]["counters"]["preparations"] == 1
    assert report["groups_sync"]["counters"]["evictions_decode"] > 0
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()

"""What groups of layers cost the scheduler per step.

    python -m benchmarks.scheduler_crowds

One more load, measured as those of :mod:`benchmarks.scheduler_cost` (CPU time of the thread in
``schedule`` plus ``update_from_output``, all schedulers in lock step, no model): 256 running
decodes with shares of layers in 8 groups, more requests waiting for places, so that admissions ask
for the forecast. vLLM's scheduler has 8 groups of the same shape.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.scheduler_cost import Load, in_lock_step

RESULT = Path(__file__).parent / "results" / "scheduler_crowds.json"
RUNNING, GROUPS = 256, 8
LIMIT = 1.10


def groups(asynchronous: bool) -> dict[str, Load]:
    """Schedulers with 8 groups of layers and more requests than places."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from benchmarks.bare_scheduler import (
        Setup,
        base_config,
        kv_cache_config,
        make_scheduler,
        vllm_config,
    )

    shares = (2.2, 1.6, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2)
    setup = Setup(
        budget=256,
        window=32,
        interval=128,
        block_size=16,
        blocks=RUNNING * 120 * GROUPS,
        max_num_seqs=RUNNING,
        max_batched=8192,
        long_prefill=64,
        asynchronous=asynchronous,
        longest=8192,
        pyramid=GROUPS,
        shares=shares,
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
        found = report[f"groups_{kind}"] = measure(groups(asynchronous), options.steps)
        print(
            f"groups, {kind}: {found['mean_us']} us, {found['ratio_mean']} "
            f"(median {found['ratio_median']}), at most {LIMIT}",
            flush=True,
        )
    assert report["groups_sync"]["counters"]["evictions_decode"] > 0
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()

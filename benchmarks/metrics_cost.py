"""What the metrics cost per step: the same evicting scheduler with and without them.

    python -m benchmarks.metrics_cost

128 running decodes, of which one evicts in every step, no model, vLLM's statistics on in both.
Engine core: ``schedule``, ``update_from_output`` and encoding what goes to the front end. Front
end: decoding it and what vLLM's stat loggers do with it. CPU time, both in lock step in one
process, so that ratios mean something on a busy machine.
"""

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

RESULT = Path(__file__).parent / "results" / "metrics_cost.json"
PROMPTS = range(256, 384)
"""Too short for a first eviction in prefill: each evicts from 512 tokens on, one a step."""

WARM_UP = 130
"""Steps until evictions begin."""


class Side:
    """One engine core and one front end, with the CPU seconds that each step took in both."""

    def __init__(self, metrics: bool, requests: int, max_tokens: int, asynchronous: bool) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        from benchmarks.bare_scheduler import Setup, make_request, make_scheduler
        from vllm_kvevict.metrics.logger import install

        install()
        setup = Setup(
            budget=384,
            window=32,
            interval=128,
            block_size=16,
            blocks=requests * ((PROMPTS.stop + max_tokens) // 16 + 32),
            max_num_seqs=requests,
            max_batched=requests * PROMPTS.stop,
            asynchronous=asynchronous,
        )
        self.metrics = metrics
        self.scheduler = make_scheduler(setup, log_stats=True)
        config = self.scheduler.vllm_config
        if metrics:
            self.loggers = StatLoggerManager(config)
        else:
            self.scheduler._reports = None
            self.loggers = StatLoggerManager(config, enable_default_loggers=False)
            self.loggers.stat_loggers = [
                logger
                for logger in StatLoggerManager(config).stat_loggers
                if type(logger).__name__ != "EvictionStatLogger"
            ]
        assert any(isinstance(each, PrometheusStatLogger) for each in self.loggers.stat_loggers)
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.core: list[float] = []
        self.front: list[float] = []
        self.reports = 0
        rng = random.Random(0)
        for index in range(requests):
            prompt = [rng.randrange(2, 1000) for _ in range(PROMPTS[index % len(PROMPTS)])]
            self.scheduler.add_request(make_request(setup, f"r{index}", prompt, max_tokens))

    def step(self, token: int) -> None:
        from vllm.v1.metrics.stats import IterationStats
        from vllm.v1.outputs import ModelRunnerOutput

        from vllm_kvevict.metrics.report import MEASURED
        from vllm_kvevict.schedule.step_plan import PLAN

        start = time.thread_time()
        output = self.scheduler.schedule()
        took = time.thread_time() - start
        ids = list(output.num_scheduled_tokens)
        sampled = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[token] for _ in ids],
        )
        if self.metrics and (plan := getattr(output, PLAN, None)) and plan.evictions:
            measured = dict(seconds=[0.01] * len(plan.evictions), head_spread=[1.25])
            setattr(sampled, MEASURED, measured)
        start = time.thread_time()
        outputs = self.scheduler.update_from_output(output, sampled)
        sent = [self.encoder.encode(each) for each in outputs.values()]
        self.core.append(took + time.thread_time() - start)
        iteration = IterationStats()
        start = time.thread_time()
        for each in sent:
            stats = self.decoder.decode(each).scheduler_stats
            self.reports += stats is not None and stats.kv_connector_stats is not None
            self.loggers.record(stats, iteration)
        self.front.append(time.thread_time() - start)


def measure(requests: int, steps: int, asynchronous: bool) -> dict[str, Any]:
    """Microseconds of a decode step with and without metrics, and their ratio."""
    sides = {
        name: Side(name == "metrics", requests, steps + WARM_UP + 2, asynchronous)
        for name in ("metrics", "none")
    }
    rng = random.Random(1)
    for side in sides.values():
        for _ in range(WARM_UP):
            side.step(2)
        assert len(side.scheduler.running) == requests, "the prefill takes one step"
        side.core.clear()
        side.front.clear()
    gc.collect()
    gc.disable()
    try:
        names = list(sides)
        for step in range(steps):
            rng.shuffle(names)
            for name in names:
                sides[name].step(2 + step % 900)
    finally:
        gc.enable()
    totals = {name: side.scheduler.eviction_counters.as_dict() for name, side in sides.items()}
    assert totals["metrics"] == totals["none"] and totals["metrics"]["evictions_decode"] > steps / 2
    assert sides["metrics"].reports > steps / 4 and sides["none"].reports == 0
    result: dict[str, Any] = {"counters": totals["metrics"], "reports": sides["metrics"].reports}
    for part in ("core", "front"):
        row: dict[str, Any] = {}
        for name, side in sides.items():
            seconds = getattr(side, part)
            row[name] = {
                "mean_us": round(statistics.fmean(seconds) * 1e6, 1),
                "median_us": round(statistics.median(seconds) * 1e6, 1),
            }
        for kind in ("mean", "median"):
            us = f"{kind}_us"
            row[f"ratio_{kind}"] = round(row["metrics"][us] / row["none"][us], 3)
        result[part] = row
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "provenance": provenance(),
        "load": {"running_requests": options.requests, "decode_steps": options.steps,
                 "block_size": 16, "prompt_tokens": [PROMPTS.start, PROMPTS.stop - 1],
                 "budget": 384, "window": 32, "interval": 128},
    }  # fmt: skip
    for kind, asynchronous in (("sync", False), ("async", True)):
        report[kind] = measure(options.requests, options.steps, asynchronous)
        for part, where in (("core", "engine core"), ("front", "front end")):
            row = report[kind][part]
            print(
                f"{kind:6}{where:12} {row['metrics']['median_us']:8} us with metrics "
                f"{row['none']['median_us']:8} without: {row['ratio_median']}x (median), "
                f"{row['ratio_mean']}x (mean)"
            )
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()

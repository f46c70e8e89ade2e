"""What more groups of layers cost a decode step: the real model, in one engine on the CPU.

    python -m benchmarks.groups_cost

Every engine serves the same requests, each of which evicts once, after its prompt; the decode steps
behind that are timed. Engines of all numbers of groups take turns, and of each the least of its
medians counts; how far its medians lie apart is this machine's noise. One group is an engine
without shares of layers.
"""

import argparse
import gc
import json
import random
import statistics
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.eviction_share import Watch, in_process
from benchmarks.provenance import provenance

RESULT = Path(__file__).parent / "results" / "groups_cost.json"
NO_GROUPS = 1


def measure(args: argparse.Namespace, groups: int) -> tuple[int, float]:
    """Groups that were made of so many, and median milliseconds of a decode step."""
    from vllm import LLM, SamplingParams

    from benchmarks.smollm2 import real_model

    eviction: dict[str, Any] = dict(policy="defensive", budget=args.budget, interval=0)
    if groups > NO_GROUPS:
        eviction |= dict(profile="auto", options=dict(groups=groups))
    llm = LLM(
        str(args.model or real_model()),
        dtype="bfloat16",
        block_size=32,
        max_model_len=args.prompt + args.steps + 32,
        max_num_batched_tokens=args.requests * args.prompt,
        max_num_seqs=args.requests,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        additional_config={"kv_eviction": eviction},
        disable_log_stats=True,
    )
    core = llm.llm_engine.engine_core.engine_core
    made = len(core.scheduler.kv_cache_config.kv_cache_groups)
    watch, rng = Watch(llm), random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(1000, 40000) for _ in range(args.prompt)]}
        for _ in range(args.requests)
    ]
    sampling = SamplingParams(max_tokens=args.steps + 1, ignore_eos=True, temperature=0)
    llm.generate(prompts, sampling, use_tqdm=False)
    evictions = core.scheduler.eviction_counters.evictions
    assert evictions == args.requests, f"{evictions} evictions of {args.requests} requests"
    llm.llm_engine.engine_core.shutdown()
    # The first steps behind the prompts still evict, or find their memory cold.
    steps = [took for took, _ in watch.steps[-args.steps + 8 :]]
    return made, statistics.median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = dict(requests=16, prompt=512, steps=128, budget=192, threads=2, rounds=3)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--groups", type=int, nargs="+", default=[3, 6, 10, 15])
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    in_process(args.threads)
    runs: dict[int, list[float]] = {}
    for groups in tqdm([NO_GROUPS, *args.groups] * args.rounds, desc="groups of layers"):
        made, took = measure(args, groups)
        runs.setdefault(made, []).append(took)
        gc.collect()
    base = min(runs[NO_GROUPS])
    rows = [
        {"groups": made, "step_ms": took, "to_one_group": min(took) / base}
        for made, took in runs.items()
    ]
    for row in rows:
        print(row)
    load = {name: getattr(args, name) for name in defaults}
    result = {**provenance(), "load": load, "rows": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

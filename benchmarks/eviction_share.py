"""What an eviction takes of the prefill before it: the real model, in one engine on the CPU.

    python -m benchmarks.eviction_share

Every prompt of ``--tokens`` is new to the prefix cache, is prefilled in one step, evicts at its end
and samples two tokens. Policies take turns, ``none`` among them; the least of all rounds counts, of
the step of the prefill without its eviction and of the eviction. With ``--profile`` also ``probe``.
"""

import argparse
import json
import os
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.provenance import provenance

RESULT = Path(__file__).parent / "results" / "eviction_share.json"
POLICIES = ("ada-snapkv", "ada-defensive", "snapkv", "defensive", "streaming-llm")


def in_process(threads: int) -> None:
    """Run engines in this process, on so many threads; to be called before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = str(threads)


class Watch:
    """Milliseconds of each step of an engine, and of the evictions in it."""

    def __init__(self, llm: Any) -> None:
        self.steps: list[tuple[float, float]] = []
        self._evicting = 0.0
        core = llm.llm_engine.engine_core.engine_core
        evictions = core.model_executor.driver_worker.worker.kv_eviction
        self._step, self._evict = core.step_fn, evictions.evict
        core.step_fn, evictions.evict = self._timed_step, self._timed_evict

    def _timed_evict(self) -> None:
        start = time.perf_counter()
        self._evict()
        self._evicting += 1e3 * (time.perf_counter() - start)

    def _timed_step(self) -> Any:
        self._evicting, start = 0.0, time.perf_counter()
        outputs = self._step()
        self.steps.append((1e3 * (time.perf_counter() - start) - self._evicting, self._evicting))
        return outputs


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds of prefill and eviction under each policy."""
    from vllm import LLM, SamplingParams

    from benchmarks.smollm2 import real_model

    policies, learned = list(args.policies), {}
    if args.profile:
        policies += ["probe"]
        options = dict(probe_window=args.probe_window)
        learned = dict(profile=str(args.profile), options=options)
    llm = LLM(
        str(args.model or real_model()),
        dtype=args.dtype,
        block_size=args.block_size,
        max_model_len=args.tokens + 32,
        max_num_batched_tokens=args.tokens + 32,
        max_num_seqs=2,
        kv_cache_memory_bytes=512 << 20,
        additional_config={
            "kv_eviction": dict(
                policy=policies[0], budget=args.budget, allow=[*policies, "none"], **learned
            )
        },
        disable_log_stats=True,
    )
    watch, rng = Watch(llm), random.Random(0)
    best: dict[str, dict[str, float]] = defaultdict(dict)
    for _ in tqdm(range(args.rounds), desc="rounds"):
        for policy in ("none", *policies):
            prompt = [rng.randrange(1000, 40000) for _ in range(args.tokens)]
            watch.steps.clear()
            llm.generate(
                {"prompt_token_ids": prompt},
                SamplingParams(max_tokens=2, ignore_eos=True, extra_args={"kv_eviction": policy}),
                use_tqdm=False,
            )
            prefill, evicting = watch.steps[0]
            mine = best[policy]
            mine["prefill"] = min(prefill, mine.get("prefill", prefill))
            mine["eviction"] = min(evicting, mine.get("eviction", evicting))
    llm.llm_engine.engine_core.shutdown()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(tokens=2048, budget=512, block_size=32, rounds=5, threads=2).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--profile", type=Path, help="of the model: measure probe as well")
    parser.add_argument("--probe-window", default="auto", choices=["auto", "none"])
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    in_process(args.threads)
    best = measure(args)
    prefill = min(mine["prefill"] for mine in best.values())
    for policy in best.keys() - {"none"}:
        assert best[policy]["eviction"] > best["none"]["eviction"], f"{policy} did not evict"
        best[policy]["share"] = best[policy]["eviction"] / prefill
        if "ada-snapkv" in best:
            mine = best[policy]["eviction"] / best["ada-snapkv"]["eviction"]
            best[policy]["to_ada_snapkv"] = mine
    result = {"provenance": provenance(), "milliseconds": best}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    for policy, mine in best.items():
        print(f"{policy:14}", ", ".join(f"{name} {value:.3f}" for name, value in mine.items()))


if __name__ == "__main__":
    main()

"""Serving ratios against the same vLLM without eviction, in one run.

    python -m benchmarks.serving.ratios [--repeats 3] [--output benchmarks/results/serving_cpu.json]

Three questions, each asked with alternating servers:

* ``memory_bound``: KV memory for two full prompts, budget 1/8 of a 2048-token prompt.
* ``nothing_to_evict``: ample KV memory, a budget that no request reaches: the plugin's own cost.
* ``idle_tiers``: eviction in both, and in one of them tiers that no request uses.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.load import Load, measure
from benchmarks.provenance import provenance
from benchmarks.server import Server
from benchmarks.serving.tiny import BLOCK_BYTES, KV_BLOCKS, KV_HEADS, OUTPUT, PROMPT, server_args
from benchmarks.tiny_model import cached_tiny_llama


@dataclass(frozen=True)
class Question:
    load: Load
    kv_bytes: int
    eviction: tuple[str, ...]
    evicts: bool
    without: tuple[str, ...] = ()
    """Flags of the server that it is compared with."""


_EVICTS = ("--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "256")
_TIERS = ("--kv-eviction-store-memory", "1G", "--kv-eviction-store-path", ".cache/serving/stores")

QUESTIONS = {
    "memory_bound": Question(
        Load(PROMPT, OUTPUT, num_prompts=48, concurrency=24),
        KV_BLOCKS * BLOCK_BYTES,
        ("--kv-eviction", "ada-snapkv", "--kv-eviction-budget", str(PROMPT // 8)),
        evicts=True,
    ),
    "nothing_to_evict": Question(
        Load(512, 256, num_prompts=48, concurrency=16),
        64 * KV_BLOCKS * BLOCK_BYTES,
        ("--kv-eviction", "ada-snapkv", "--kv-eviction-budget", "2304"),
        evicts=False,
    ),
    "idle_tiers": Question(
        Load(512, 256, num_prompts=48, concurrency=16),
        64 * KV_BLOCKS * BLOCK_BYTES,
        (*_EVICTS, *_TIERS),
        evicts=True,
        without=_EVICTS,
    ),
}


def run(name: str, question: Question, model: Path, repeats: int, bar: tqdm) -> dict:
    """Alternate stock and eviction ``repeats`` times; medians, and the ratios of each pair."""
    args = server_args()
    args[args.index("--kv-cache-memory-bytes") + 1] = str(question.kv_bytes)
    rows: dict[str, list[dict]] = {"stock": [], "eviction": []}
    for repeat in range(repeats):
        for label, extra in (("stock", question.without), ("eviction", question.eviction)):
            bar.set_description(f"{name}, {label}, run {repeat + 1} of {repeats}")
            log = Path(".cache") / "serving" / f"{name}-{label}-{repeat}.log"
            with Server(model, [*args, *extra], log) as server:
                # The first requests of a server pay for warm-up.
                measure(server, model, Load(64, 16, 4, 4, seed=99))
                row = measure(server, model, question.load)
            rows[label].append({**row, **(server.evictions() if extra else {})})
            bar.update()
    if any(bool(row["evictions"]) != question.evicts for row in rows["eviction"]):
        raise RuntimeError(f"{name}: evictions {[r['evictions'] for r in rows['eviction']]}")

    def ratios(key: str) -> list[float]:
        pairs = zip(rows["stock"], rows["eviction"], strict=True)
        return [round(b[key] / a[key], 3) for a, b in pairs if a[key]]

    keys = ("peak_running", "output_tokens_per_s", "ttft_ms_median", "tpot_ms_median")
    return {
        "load": asdict(question.load),
        "kv_cache_bytes": question.kv_bytes,
        "eviction": " ".join(question.eviction),
        "without": " ".join(question.without),
        "ratio_eviction_to_stock": {
            key: {"median": round(statistics.median(ratios(key)), 3), "runs": ratios(key)}
            for key in keys
        },
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=sorted(QUESTIONS))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/serving_cpu.json"))
    options = parser.parse_args()
    chosen = {k: q for k, q in QUESTIONS.items() if options.only in (None, k)}
    model = cached_tiny_llama(kv_heads=KV_HEADS)
    with tqdm(total=2 * options.repeats * len(chosen)) as bar:
        results = {k: run(k, q, model, options.repeats, bar) for k, q in chosen.items()}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({**provenance(), "results": results}, indent=2) + "\n")
    for name, result in results.items():
        print(name)
        for key, ratio in result["ratio_eviction_to_stock"].items():
            print(f"  {key:<22}{ratio['median']:>8.3f}x   runs {ratio['runs']}")


if __name__ == "__main__":
    main()

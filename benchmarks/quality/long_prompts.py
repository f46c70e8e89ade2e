"""Prompts longer than the KV cache, evicted as they stream in: what their continuation loses.

    python -m benchmarks.quality.long_prompts [--texts 4] [--context 8000] [--blocks 63]

A server whose pool holds a quarter of the prompt reads it with evictions every K tokens and is made
to say the true continuation (`forced.py`); so is one with the full cache. Reported are the negative
log-likelihood of the continuation and the share of its tokens at which the first choice is the full
cache's.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from benchmarks.quality.endpoint import Endpoint, Followed
from benchmarks.quality.intervals import bootstrap
from benchmarks.quality.ruler.prose import passage
from benchmarks.quality.table import row
from benchmarks.server import Server
from benchmarks.smollm2 import real_model

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "long_prompts.json"
BLOCK = 32


@dataclass(frozen=True)
class Setting:
    """What a request asks for; no policy for the full cache."""

    policy: str | None = None
    budget: int | None = None
    interval: int | None = None

    @property
    def xargs(self) -> dict[str, Any]:
        if self.policy is None:
            return {}
        return {
            "kv_eviction": self.policy,
            "kv_eviction_budget": self.budget,
            "kv_eviction_prefill_interval": self.interval,
        }


def server(blocks: int, options: argparse.Namespace, evicting: bool) -> Server:
    args = [
        "--dtype", "bfloat16", "--enforce-eager", "--block-size", str(BLOCK), "--seed", "0",
        "--num-gpu-blocks-override", str(blocks), "--kv-cache-memory-bytes", "256M",
        "--max-model-len", "8192", "--max-num-batched-tokens", "2048", "--max-num-seqs", "4",
        "--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--no-enable-log-requests",
        "--logits-processors", "benchmarks.quality.forced:ForcedTokens",
    ]  # fmt: skip
    if evicting:
        args += [
            "--kv-eviction", options.policies[0], "--kv-eviction-allow", ",".join(options.policies),
            "--kv-eviction-budget", str(max(options.budgets)),
            "--kv-eviction-prefill-interval", str(max(options.intervals)),
        ]  # fmt: skip
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(options.threads)}
    return Server(options.model or real_model(), args, options.work / "long.log", env=env)


def text(endpoint: Endpoint, seed: int, tokens: int) -> list[int]:
    return endpoint.encode(" ".join(passage(random.Random(f"long/{seed}"), 6 * tokens)))[:tokens]


def summarize(rows: Sequence[dict[Setting, Followed]]) -> list[dict[str, Any]]:
    """Means over texts with 95% bootstrap intervals, excess and agreement paired by text."""
    entries = []
    for setting in rows[0]:
        nll, excess, same = [], [], []
        for found in rows:
            mine, full = found[setting], found[Setting()]
            nll.append(-float(np.mean(mine.logprobs)))
            excess.append(nll[-1] + float(np.mean(full.logprobs)))
            same.append(float(np.mean(np.array(mine.greedy) == np.array(full.greedy))))
        estimates = {
            name: dict(zip(("mean", "low", "high"), (np.mean(v), *bootstrap([v])), strict=True))
            for name, v in (("nll", nll), ("excess", excess), ("same", same))
        }
        entries.append({**asdict(setting), **estimates})
    return entries


def markdown(result: dict[str, Any]) -> str:
    options = result["options"]
    lines = [
        "# Prompts longer than the KV cache",
        "",
        f"`{result['command']}`, {result['date']}, commit {result['commit']}; {result['texts']} "
        f"texts, {options['context']} tokens of prompt in a pool of {result['pool_tokens']}, "
        f"{options['continuation']} behind them. {result['machine']}.",
        "",
        "Means over texts with 95% bootstrap intervals. NLL of the true text in nats a token; "
        "excess over the full cache, text by text; same: tokens whose most likely choice is the "
        "full cache's.",
        "",
        row("policy", "budget", "K", "NLL", "excess", "same, %"),
        row("---", "---:", "---:", "---:", "---:", "---:"),
    ]
    for one in result["settings"]:
        excess, same = one["excess"], one["same"]
        lines.append(
            row(
                one["policy"] or "full cache", str(one["budget"] or "-"),
                str(one["interval"] or "-"), f"{one['nll']['mean']:.3f}",
                f"{excess['mean']:+.3f} [{excess['low']:+.3f}, {excess['high']:+.3f}]",
                f"{100 * same['mean']:.1f} [{100 * same['low']:.1f}, {100 * same['high']:.1f}]",
            )
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def write(options: argparse.Namespace, rows: Sequence[Any], evictions: dict[str, int]) -> None:
    settings = {k: str(v) for k, v in vars(options).items()}
    result = {
        **provenance(),
        "options": settings,
        "texts": len(rows),
        "pool_tokens": (options.blocks - 1) * BLOCK,
        "evictions": evictions,
        "settings": summarize(rows),
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(markdown(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--continuation", type=int, default=128)
    parser.add_argument("--policies", default="ada-defensive,ada-snapkv,streaming-llm")
    parser.add_argument("--budgets", default="512,1024")
    parser.add_argument("--intervals", default="128,512")
    parser.add_argument("--blocks", type=int, default=63, help="of the pool, vLLM's own included")
    parser.add_argument("--model", type=Path, help="folder; SmolLM2-135M-Instruct without it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path(".cache/quality"))
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    options.policies = options.policies.split(",")
    options.budgets = [int(budget) for budget in options.budgets.split(",")]
    options.intervals = [int(interval) for interval in options.intervals.split(",")]
    return options


def main() -> None:
    options = parse()
    options.work.mkdir(parents=True, exist_ok=True)
    wanted = options.context + options.continuation
    texts, rows = [], []
    with server(-(-8192 // BLOCK) + 2, options, evicting=False) as running:
        endpoint = Endpoint(running.url, timeout_s=1800)
        for seed in range(options.texts):
            texts.append(tuple(text(endpoint, seed, wanted)))
            context, rest = texts[-1][: options.context], texts[-1][options.context :]
            rows.append({Setting(): endpoint.follow(context, rest, {})})
            print(f"full cache, text {seed}", flush=True)
    with server(options.blocks, options, evicting=True) as running:
        endpoint = Endpoint(running.url, timeout_s=1800)
        for done, (ids, found) in enumerate(zip(texts, rows, strict=True), 1):
            context, rest = ids[: options.context], ids[options.context :]
            for policy in options.policies:
                for budget in options.budgets:
                    for interval in options.intervals:
                        setting = Setting(policy, budget, interval)
                        found[setting] = endpoint.follow(context, rest, setting.xargs)
                        print(done, setting, flush=True)
            count = running.metric("vllm_kvevict:evictions_total")
            least = done * len(options.policies) * len(options.budgets) * 2
            if not count or count < least:
                raise SystemExit(f"{count} evictions, {least} or more were asked for")
            write(options, rows[:done], {"evictions": int(count)})
    print(options.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()

"""How stable shares by layer are: over tasks, prompts, lengths and budgets. CPU, minutes.

python -m benchmarks.layer_shares MODEL --output benchmarks/results/layer_shares.json
"""

import argparse
import json
import os
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.provenance import provenance

BUDGETS = (0.0625, 0.125, 0.25, 0.5)
LENGTHS = {1400: 6, 700: 3, 2800: 3}
"""Built-in samples of each length in tokens."""


def measure(model: str, policy: str, block_size: int) -> list[dict[str, Any]]:
    """Shares by layer of every prompt at every budget."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvevict.calibrate import rank
    from vllm_kvevict.calibrate.engine import QUESTION_TOKENS, progress, scores_of
    from vllm_kvevict.calibrate.prompts import builtin, token_ids
    from vllm_kvevict.inspect.engine import load_tokenizer, sized, start

    args = EngineArgs(
        model, dtype="bfloat16", block_size=block_size, enforce_eager=True, max_num_seqs=1,
        enable_prefix_caching=True,
        additional_config={"kv_eviction": {"policy": policy, "budget": "6%", "interval": 0}},
    )  # fmt: skip
    tokenizer = load_tokenizer(args)
    prompts = []
    for length, count in LENGTHS.items():
        room = length - QUESTION_TOKENS
        fits = lambda text, room=room: len(tokenizer.encode(text)) <= room  # noqa: E731
        for index, sample in enumerate(builtin(count, fits)):
            task = "summary" if index % 3 == 2 else "facts"
            pair = zip(("aware", "agnostic"), token_ids(tokenizer, sample), strict=True)
            prompts += [(dict(task=task, scenario=name, length=length), ids) for name, ids in pair]
    llm = start(sized(args, max(len(ids) for _, ids in prompts) + 2))
    found = []
    for what, ids in progress(prompts):
        scores = scores_of(llm, ids)
        for budget in BUDGETS:
            counts = rank.kept(scores, max(1, int(len(ids) * budget) - 32))
            shares = rank.by_layer(counts.double() / counts.double().mean())
            found.append(what | dict(tokens=len(ids), budget=budget, shares=shares))
    llm.llm_engine.engine_core.shutdown()
    return found


def average(rows: list[dict[str, Any]]) -> list[float]:
    """Shares by layer, averaged over prompts."""
    return [mean(layer) for layer in zip(*(row["shares"] for row in rows), strict=True)]


def apart(one: list[float], other: list[float]) -> float:
    """What two sets of shares differ by, on average over layers."""
    return mean(abs(a - b) for a, b in zip(one, other, strict=True))


def by_prompts(rows: list[dict[str, Any]]) -> list[float]:
    """For k = 1, 2, ...: what the mean of k prompts differs from the mean of all the others."""
    found = []
    for count in range(1, len(rows) // 2 + 1):
        picks = list(combinations(range(len(rows)), count))[:: max(1, len(rows) // 2)][:200]
        differences = []
        for pick in picks:
            mine = [rows[index] for index in pick]
            rest = [row for index, row in enumerate(rows) if index not in pick]
            differences.append(apart(average(mine), average(rest)))
        found.append(round(mean(differences), 3))
    return found


def slices(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Prompts that differ from the base, 1400 tokens at 25%, in one respect each."""
    base = [row for row in rows if row["length"] == 1400 and row["budget"] == 0.25]
    found = {"all at 25%, 1400 tokens": base}
    for key in ("scenario", "task"):
        for value in sorted({row[key] for row in base}):
            found[value] = [row for row in base if row[key] == value]
    for length in (700, 2800):
        found[f"{length} tokens"] = [
            row for row in rows if row["length"] == length and row["budget"] == 0.25
        ]
    for budget in (0.0625, 0.125, 0.5):
        found[f"at {budget * 100:g}%"] = [
            row for row in rows if row["length"] == 1400 and row["budget"] == budget
        ]
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Layer x slice as colours, and the difference over the number of prompts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = slices(rows)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 4.2), width_ratios=[3, 1], layout="constrained"
    )
    image = left.imshow([average(part) for part in parts.values()], aspect="auto", cmap="viridis")
    left.set_yticks(range(len(parts)), list(parts))
    left.set_xlabel("layer")
    left.set_title("share of the mean budget", loc="left", fontsize=10)
    figure.colorbar(image, ax=left)
    values = by_prompts(parts["all at 25%, 1400 tokens"])
    right.plot(range(1, len(values) + 1), values, marker="o")
    right.set_ylim(0)
    right.set_xlabel("prompts")
    right.set_title("apart from the other prompts", loc="left", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--policy", default="ada-defensive")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    rows = measure(args.model, args.policy, args.block_size)
    parts = slices(rows)
    base = average(next(iter(parts.values())))
    summary = {name: round(apart(base, average(part)), 3) for name, part in parts.items()}
    result = {
        "provenance": provenance(), "policy": args.policy, "differs_from_the_first": summary,
        "differs_by_prompts": by_prompts(next(iter(parts.values()))), "prompts": rows,
    }  # fmt: skip
    args.output.write_text(json.dumps(result) + "\n")
    draw(rows, args.output.with_suffix(".png"))
    print(json.dumps(summary, indent=1), result["differs_by_prompts"])


if __name__ == "__main__":
    main()

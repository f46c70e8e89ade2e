"""The result of `long_prompts.py` as entries, as Markdown and as a figure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import sentence
from benchmarks.quality.endpoint import Followed
from benchmarks.quality.intervals import bootstrap
from benchmarks.quality.table import beside_full, row


def joined(parts: Iterable[Followed]) -> Followed:
    """What a server said of several answers as if they were one."""
    found = list(parts)
    return Followed(
        tuple(logprob for one in found for logprob in one.logprobs),
        tuple(token for one in found for token in one.greedy),
    )


def summarize(rows: Sequence[Mapping[Any, Followed]], full: Any) -> list[dict[str, Any]]:
    """Means over texts with 95% bootstrap intervals, excess and agreement paired by text.

    Args:
        rows: What each setting said, by text; settings are dataclasses.
        full: The setting with the full cache.

    """
    entries = []
    for setting in rows[0]:
        nll, excess, same = [], [], []
        for found in rows:
            mine, whole = found[setting], found[full]
            nll.append(-float(np.mean(mine.logprobs)))
            excess.append(nll[-1] + float(np.mean(whole.logprobs)))
            same.append(float(np.mean(np.array(mine.greedy) == np.array(whole.greedy))))
        estimates = {
            name: dict(zip(("mean", "low", "high"), (np.mean(v), *bootstrap([v])), strict=True))
            for name, v in (("nll", nll), ("excess", excess), ("same", same))
        }
        entries.append({**asdict(setting), **estimates})
    return entries


def markdown(result: dict[str, Any]) -> str:
    options = result["options"]
    said = f"{options['continuation']} behind them"
    if options.get("kind") == "facts":
        said = f"{options['facts']} facts in each, asked for one by one with the true answer forced"
    lines = [
        "# Prompts longer than the KV cache",
        "",
        sentence(
            result,
            f"{result['texts']} texts, {options['context']} tokens of prompt in a pool of "
            f"{result['pool_tokens']}, {said}",
        ),
        "",
        "Means over texts with 95% bootstrap intervals. NLL of what is forced in nats a token; "
        "excess over the full cache, text by text; same: tokens whose most likely choice is the "
        "full cache's. K at the end: one eviction, in a pool that holds the whole prompt.",
        "",
        row("policy", "budget", "K", "NLL", "excess", "same, %"),
        row("---", "---:", "---:", "---:", "---:", "---:"),
    ]
    for one in result["settings"]:
        at_end = "-" if one["policy"] is None else "at the end"
        lines.append(
            row(
                one["policy"] or "full cache", str(one["budget"] or "-"),
                str(one["interval"] or at_end), f"{one['nll']['mean']:.3f}",
                *beside_full(one["excess"], one["same"]),
            )
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], output: Path) -> None:
    """Excess NLL against K, a line a policy, a panel a budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    evicted = [one for one in result["settings"] if one["policy"]]
    budgets = sorted({one["budget"] for one in evicted})
    intervals = sorted({one["interval"] for one in evicted}, key=lambda k: k or float("inf"))
    figure, axes = pyplot.subplots(
        1, len(budgets), figsize=(4.5 * len(budgets), 3.4), sharey=True, squeeze=False
    )
    for axis, budget in zip(axes[0], budgets, strict=True):
        for index, policy in enumerate(dict.fromkeys(one["policy"] for one in evicted)):
            mine = [one for one in evicted if (one["policy"], one["budget"]) == (policy, budget)]
            places = [intervals.index(one["interval"]) + 0.05 * index for one in mine]
            found = [one["excess"] for one in mine]
            errors = [
                [max(0, one["mean"] - one["low"]) for one in found],
                [max(0, one["high"] - one["mean"]) for one in found],
            ]
            axis.errorbar(places, [one["mean"] for one in found], errors, marker="o", capsize=3,
                          linestyle="none", label=policy)  # fmt: skip
        axis.axhline(0, color="black", linewidth=0.9)
        axis.set_xticks(range(len(intervals)), [str(k or "at the end") for k in intervals])
        axis.set_title(f"budget {budget}", fontsize=10)
        axis.set_xlabel("K, prompt tokens between evictions", fontsize=9)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("NLL over the full cache's, nats a token", fontsize=9)
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    # No date or version inside: the same results give the same file.
    figure.savefig(output, dpi=100, metadata={"Software": None})
    pyplot.close(figure)

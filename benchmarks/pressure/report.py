"""The result as Markdown, and the picture."""

from pathlib import Path
from typing import Any

from benchmarks.pressure.servers import ALWAYS, PRESSURE, STOCK, WAYS
from benchmarks.provenance import sentence
from benchmarks.quality.prompt import AGNOSTIC, AWARE
from benchmarks.quality.table import row

COLORS = {STOCK: "black", ALWAYS: "tab:orange", PRESSURE: "tab:blue"}


def markdown(result: dict[str, Any]) -> str:
    options = result["options"]
    lines = [
        "# Eviction under pressure, over HTTP",
        "",
        sentence(result, f"{options['policy']}, {options['budget']} tokens per KV head"),
    ]
    for part, table in (("lossless", _lossless), ("swing", _swing), ("needle", _needle)):
        if part in result:
            lines += ["", *table(result[part])]
    return "\n".join(lines) + "\n"


def _lossless(found: dict[str, Any]) -> list[str]:
    ours = found["counted"][PRESSURE]
    spread = f"{min(found['throughput_ratios']):.3f} to {max(found['throughput_ratios']):.3f}"
    return [
        "## Memory for all",
        "",
        f"{found['load']}. {found['same_answers']} of {found['answers']} answers of "
        f"{found['tokens_an_answer']} tokens have the tokens of stock vLLM. "
        f"{ours['evictions']} evictions in {ours['steps']} steps. Output tokens/s "
        f"{found['throughput_ratio_median']:.3f}x of stock vLLM (median of "
        f"{len(found['throughput_ratios'])} pairs, {spread}).",
    ]


def _swing(found: dict[str, Any]) -> list[str]:
    lines = [
        "## Too little memory, and a load that swings",
        "",
        f"{found['load']}.",
        "",
        row("way", "phase", "output tokens/s", "sampled", "sampled a step", "preemptions",
            "evictions", "never evicted"),
        row("---", "---", *["---:"] * 6),
    ]  # fmt: skip
    for one in found["rows"]:
        lines.append(
            row(
                one["way"], one["phase"], f"{one['output_tokens_per_s']:.0f}", str(one["sampled"]),
                f"{one['sampled_a_step']:.2f}", str(one["preemptions"]), str(one["evictions"]),
                _whole(one),
            )
        )  # fmt: skip
    return lines


def _needle(found: dict[str, Any]) -> list[str]:
    lines = [
        "## One needle under load",
        "",
        f"{found['load']}. Accuracy in percent with 95% intervals; memory in full requests.",
        "",
        row("memory", "way", "question seen", "question not seen", "peak sequences",
            "output tokens/s", "preemptions", "evictions", "never evicted"),
        row("---:", "---", *["---:"] * 7),
    ]  # fmt: skip
    for one in found["rows"]:
        lines.append(
            row(
                str(one["memory"]), one["way"], _percent(one[AWARE]), _percent(one[AGNOSTIC]),
                str(one["peak_running"]), f"{one['output_tokens_per_s']:.0f}",
                str(one["preemptions"]), str(one["evictions"]), _whole(one),
            )
        )  # fmt: skip
    return lines


def _whole(one: dict[str, Any]) -> str:
    """Requests that were never evicted, of those of a server that evicts."""
    ended = one["whole"] + one["evicted"]
    return f"{one['whole']} of {ended}" if ended else "-"


def _percent(found: dict[str, float]) -> str:
    return f"{100 * found['mean']:.0f} [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"


def plot(result: dict[str, Any], output: Path) -> None:
    """Accuracy in both scenarios and throughput against KV memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["needle"]["rows"]
    titles = ("accuracy, question seen", "accuracy, context evicted before the question")
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6))
    for index, way in enumerate(WAYS):
        mine = [one for one in rows if one["way"] == way]
        if not mine:
            continue
        # A little aside, or equal lines hide one another.
        places = [one["memory"] * (1 + 0.02 * (index - 1)) for one in mine]
        style = dict(color=COLORS[way], marker="o", label=way, linestyle="--" if not index else "-")
        for axis, scenario in zip(axes, (AWARE, AGNOSTIC), strict=False):
            found = [one[scenario] for one in mine]
            errors = [
                [100 * (one["mean"] - one["low"]) for one in found],
                [100 * (one["high"] - one["mean"]) for one in found],
            ]
            axis.errorbar(places, [100 * one["mean"] for one in found], errors, capsize=3, **style)
        axes[2].plot(places, [one["output_tokens_per_s"] for one in mine], **style)
    for axis, title in zip(axes, (*titles, "output tokens/s"), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_xlabel("KV memory, full requests", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("%", fontsize=9)
    axes[0].legend(frameon=False, fontsize=9, loc="lower right")
    figure.tight_layout()
    # No date or version inside: the same results give the same file.
    figure.savefig(output, dpi=100, metadata={"Software": None})
    pyplot.close(figure)

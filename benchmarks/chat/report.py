"""The result as Markdown, and the picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chat.measure import PREEMPTIONS
from benchmarks.chat.servers import STOCK
from benchmarks.provenance import sentence
from benchmarks.quality.table import row

COLUMNS = (
    ("stores made", ("stores_published",)),
    ("reused", ("stores_reused",)),
    ("restored", ("stores_restored_memory", "stores_restored_file")),
    ("evictions", ("evictions",)),
    (PREEMPTIONS, (PREEMPTIONS,)),
)
"""Head of a column, and the counters that are added up below it."""


LATER = 3
"""First of the turns that the table also shows together."""


def markdown(result: dict[str, Any]) -> str:
    """Both tables, and why rows are missing."""
    lines = [
        "# Chats of several turns",
        "",
        sentence(result, result["load"]),
    ]
    rows = result["rows"]
    if rows:
        lines += ["", *_turns(rows), "", *_servers(rows)]
    for failed in result["failed"]:
        lines += ["", f"Not measured: {failed['server']} ({failed['reason']})."]
    return "\n".join(lines) + "\n"


def _turns(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "Computed: prompt tokens of all chats that no cache and no store held. New: those that "
        "were neither in the prompt of the turn before nor in its answer. Mistaken: wrong answers "
        "that name another number of the chat.",
        "",
        row("server", "turn", "right answers", "TTFT, median, s", "of stock's", "prompt tokens",
            "new", "computed", "of the new", "mistaken"),
        row("---", "---:", *["---:"] * 8),
    ]  # fmt: skip
    stock = _stock(rows)
    stocks = _with_later(stock["turns"]) if stock else []
    for one in rows:
        for number, turn in enumerate(_with_later(one["turns"])):
            base = stocks[number]["ttft_s_median"] if stock else None
            lines.append(
                row(
                    one["title"], str(turn["turn"]), _right(turn), f"{turn['ttft_s_median']:.2f}",
                    _ratio(turn["ttft_s_median"], base), f"{turn['prompt_tokens']:,}",
                    f"{turn['new_tokens']:,}", f"{turn['computed_tokens']:,}",
                    _ratio(turn["computed_tokens"], turn["new_tokens"]),
                    "-" if turn["right"] is None else str(turn["mistaken"]),
                )
            )  # fmt: skip
    return lines


def _with_later(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns, and all from the third on as one: the first two fill the KV cache."""
    if len(turns) <= LATER:
        return list(turns)
    later = turns[LATER - 1 :]
    right = [turn["right"] for turn in later if turn["right"] is not None]
    sums = ("answers", "mistaken", "prompt_tokens", "new_tokens", "computed_tokens")
    together = {name: sum(turn[name] for turn in later) for name in sums}
    return [
        *turns,
        together
        | {
            "turn": f"{LATER} on",
            "right": sum(right) if right else None,
            "ttft_s_median": median(seconds for turn in later for seconds in turn["ttft_s"]),
        },
    ]


def _servers(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        row("server", "wall, s", "of stock's", "output tokens/s", "peak sequences",
            *(head for head, _ in COLUMNS)),
        row("---", *["---:"] * (4 + len(COLUMNS))),
    ]  # fmt: skip
    stock = _stock(rows)
    for one in rows:
        lines.append(
            row(
                one["title"], f"{one['seconds']:.1f}",
                _ratio(one["seconds"], stock["seconds"] if stock else None),
                f"{one['output_tokens_per_s']:.1f}", str(one["peak_running"]),
                *(f"{sum(one['counted'].get(c, 0) for c in names):,}" for _, names in COLUMNS),
            )
        )  # fmt: skip
    return lines


def _stock(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return next((one for one in rows if one["server"] == STOCK), None)


def _ratio(value: float, base: float | None) -> str:
    return f"{value / base:.2f}x" if base else "-"


def _right(turn: dict[str, Any]) -> str:
    return "-" if turn["right"] is None else f"{turn['right']} of {turn['answers']}"


def plot(result: dict[str, Any], output: Path) -> None:
    """Median TTFT by server, a bar a turn, with the right answers above the bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    turns = len(rows[0]["turns"])
    width = 0.8 / turns
    figure, axes = pyplot.subplots(figsize=(2 + 1.4 * len(rows), 4), layout="constrained")
    for turn in range(turns):
        found = [one["turns"][turn] for one in rows]
        places = [index + (turn - (turns - 1) / 2) * width for index in range(len(rows))]
        bars = axes.bar(
            places, [one["ttft_s_median"] for one in found], 0.9 * width, label=f"turn {turn + 1}"
        )
        labels = ["" if one["right"] is None else _right(one) for one in found]
        axes.bar_label(bars, labels, fontsize=7, padding=2)
    axes.set_xticks(range(len(rows)), [one["title"].replace(", ", ",\n") for one in rows])
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylabel("time to first token, median, s")
    axes.set_title(f"{result['load']}; above the bars: right answers", fontsize=8, wrap=True)
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    # No date or version inside: the same results give the same file.
    figure.savefig(output, dpi=100, metadata={"Software": None})
    pyplot.close(figure)

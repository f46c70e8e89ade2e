"""From scores by turn to accuracies with intervals, and their table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.provenance import sentence
from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.intervals import Estimate, estimate, estimate_difference
from benchmarks.quality.table import percent, points, row


def summarize(rows: Sequence[Mapping[Cell, Sequence[float]]]) -> list[dict[str, Any]]:
    """One entry a cell.

    Args:
        rows: Scores in [0, 1] by cell and turn, one mapping a context; all have
            :data:`~benchmarks.quality.cell.FULL_CELL`.

    Returns:
        ``turns`` holds an estimate for each turn. ``all`` is the mean over all turns, and
        ``difference`` what it is above the full cache's. The answers about one context depend on
        one another, so these two are estimates over the contexts' means.

    """
    entries = []
    full = [_mean(found[FULL_CELL]) for found in rows]
    for cell in rows[0]:
        by_turn = zip(*(found[cell] for found in rows), strict=True)
        means = [_mean(found[cell]) for found in rows]
        entries.append(
            {
                **asdict(cell),
                "turns": [asdict(estimate(scores)) for scores in by_turn],
                "all": asdict(estimate(means)),
                "difference": asdict(estimate_difference([means], [full])),
            }
        )
    return entries


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def markdown(result: Mapping[str, Any]) -> str:
    """The table of a result, a row a cell."""
    options, evictions = result["options"], result["evictions"]
    expected, counted = evictions["expected"], evictions["counted"]
    turns = range(1, len(result["cells"][0]["turns"]) + 1)
    lines = [
        "# Several questions in turn about one context",
        "",
        sentence(
            result,
            f"{options['samples']} contexts of "
            f"{result['context_tokens']:.0f} tokens, {len(turns)} questions about each, seed "
            f"{options['seed']}",
        ),
        "",
        "Accuracy in percent with 95% intervals. Contexts are evicted before any question is known."
        " The last two columns are means over all turns, and their difference from the full cache, "
        "with intervals over contexts.",
        "",
        f"{counted['evictions']} evictions ({expected['evictions']} pairs of context and budget), "
        f"{counted['stores_reused']} turns reused a store ({expected['stores_reused']} later "
        f"turns), {counted['tokens_reused']} tokens were not computed again.",
        *(f"\n{note}" for note in result["notes"]),
        "",
        row("policy", "budget", "tokens", *(f"turn {turn}" for turn in turns), "all", "difference"),
        row("---", *["---:"] * (len(turns) + 4)),
    ]
    for entry in result["cells"]:
        budget = entry["budget"]
        tokens = result["kept_tokens"][budget] if budget else result["context_tokens"]
        lines.append(
            row(
                entry["label"], budget or "-", f"{tokens:.0f}",
                *(percent(Estimate(**found)) for found in entry["turns"]),
                percent(Estimate(**entry["all"])),
                points(Estimate(**entry["difference"])) if budget else "-",
            )
        )  # fmt: skip
    return "\n".join([*lines, ""])

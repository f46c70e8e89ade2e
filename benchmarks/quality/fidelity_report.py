"""From what the model thought of prose to means with intervals, and their table."""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from benchmarks.provenance import sentence
from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.endpoint import Followed
from benchmarks.quality.intervals import Estimate, bootstrap
from benchmarks.quality.table import beside_full, row


def _estimate(values: Sequence[float]) -> Estimate:
    """Mean over texts and a bootstrap interval over them."""
    return Estimate(float(np.mean(values)), *bootstrap([values]), len(values))


def summarize(rows: Sequence[dict[Cell, Followed]], bins: int) -> list[dict]:
    """One entry a cell and part of the continuation.

    The first token is left out: it comes from full attention, before any eviction.

    Args:
        rows: One a text, each with :data:`FULL_CELL`.
        bins: Equal parts of the continuation.

    Returns:
        ``nll`` in nats a token, ``excess`` of it over the full cache's (paired by text), ``same``,
        the share of tokens whose most likely choice is the full cache's; each an estimate over
        texts. ``first`` and ``last`` are positions in the continuation.

    """
    length = len(rows[0][FULL_CELL].logprobs)
    parts = np.array_split(np.arange(1, length), bins)
    entries = []
    for cell in rows[0]:
        for part in parts:
            nll, excess, same = [], [], []
            for found in rows:
                mine, full = found[cell], found[FULL_CELL]
                nll.append(-float(np.mean(np.array(mine.logprobs)[part])))
                excess.append(nll[-1] + float(np.mean(np.array(full.logprobs)[part])))
                equal = np.array(mine.greedy)[part] == np.array(full.greedy)[part]
                same.append(float(np.mean(equal)))
            entries.append(
                {
                    **asdict(cell), "first": int(part[0]), "last": int(part[-1]),
                    "nll": asdict(_estimate(nll)), "excess": asdict(_estimate(excess)),
                    "same": asdict(_estimate(same)),
                }
            )  # fmt: skip
    return entries


def markdown(result: dict) -> str:
    """The table of a result, a row a cell and part."""
    options = result["options"]
    lines = [
        "# Fidelity under eviction",
        "",
        sentence(
            result,
            f"{options['texts']} texts of {options['source']}, {options['context']} tokens before "
            f"the eviction, {options['continuation']} after it, interval {options['interval']}",
        ),
        "",
        "Means over texts with 95% bootstrap intervals. NLL of the true text in nats a token; "
        "excess over the full cache, text by text; same: tokens whose most likely choice is the "
        "full cache's.",
        "",
        row("policy", "budget", "tokens", "NLL", "excess", "same, %"),
        row("---", "---", "---", "---:", "---:", "---:"),
    ]
    for entry in result["cells"]:
        lines.append(
            row(
                entry["label"], entry["budget"] or "-", f"{entry['first']}-{entry['last']}",
                f"{entry['nll']['mean']:.3f}", *beside_full(entry["excess"], entry["same"]),
            )
        )  # fmt: skip
    return "\n".join([*lines, ""])

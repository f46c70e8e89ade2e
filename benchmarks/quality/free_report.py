"""From long free answers to means with intervals, and their table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.provenance import sentence
from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.intervals import Estimate, bootstrap
from benchmarks.quality.prompt import common_prefix
from benchmarks.quality.table import percent, points, row

FIRST_TOKENS = 128
"""Tokens at the beginning of an answer that are reported on their own."""


@dataclass(frozen=True)
class Answer:
    """A free answer.

    Args:
        text: The answer.
        ids: Its token ids.
        logprobs: Log-probabilities of these tokens under the full cache, in nats.
        share: Share of the facts' values that the text contains, in [0, 1].

    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    share: float

    def nll(self, tokens: int | None = None) -> float:
        """Negative log-likelihood under the full cache in nats a token, of the first ``tokens``."""
        return -fmean(self.logprobs[:tokens])


def _estimate(values: Sequence[float]) -> dict[str, float]:
    """Mean and a bootstrap interval over contexts."""
    return asdict(Estimate(fmean(values), *bootstrap([values]), len(values)))


def summarize(rows: Sequence[Mapping[Cell, Answer]]) -> list[dict[str, Any]]:
    """One entry a cell.

    Args:
        rows: Answers by cell, one mapping a context; all have
            :data:`~benchmarks.quality.cell.FULL_CELL`.

    Returns:
        ``nll_first``, ``nll`` in nats a token under the full cache, of the first
        :data:`FIRST_TOKENS` tokens and of all, and ``share`` of the values; each an estimate over
        contexts. ``excess_first``, ``excess`` and ``share_difference`` are their differences from
        the full cache's answer, context by context. ``same_tokens`` is the median number of tokens
        before the first that differs from the full cache's answer.

    """
    measures: dict[str, Callable[[Answer], float]] = {
        "nll_first": lambda answer: answer.nll(FIRST_TOKENS),
        "nll": lambda answer: answer.nll(),
        "share": lambda answer: answer.share,
    }
    differences = {"nll_first": "excess_first", "nll": "excess", "share": "share_difference"}
    entries = []
    for cell in rows[0]:
        entry: dict[str, Any] = asdict(cell)
        for name, measure in measures.items():
            ours = [measure(found[cell]) for found in rows]
            full = [measure(found[FULL_CELL]) for found in rows]
            entry[name] = _estimate(ours)
            pairs = zip(ours, full, strict=True)
            entry[differences[name]] = _estimate([a - b for a, b in pairs])
        entry["same_tokens"] = median(
            common_prefix(found[cell].ids, found[FULL_CELL].ids) for found in rows
        )
        entries.append(entry)
    return entries


def _nats(found: Mapping[str, float], sign: str = "") -> str:
    low, high = (f"{found[key]:{sign}.3f}" for key in ("low", "high"))
    return f"{found['mean']:{sign}.3f} [{low}, {high}]"


def markdown(result: Mapping[str, Any]) -> str:
    """The table of a result, a row a cell."""
    options, evictions = result["options"], result["evictions"]
    expected, counted = evictions["expected"], evictions["counted"]
    first = f"first {FIRST_TOKENS}"
    lines = [
        "# Long free answers",
        "",
        sentence(
            result,
            f"{options['samples']} prompts of about {options['length']} tokens with "
            f"{options['facts']} facts, answers of {options['tokens']} tokens, seed "
            f"{options['seed']}",
        ),
        "",
        f"NLL: negative log-likelihood of an answer under the full cache, in nats a token, of its "
        f"first {FIRST_TOKENS} tokens and of all; excess: over the full cache's own answer. Facts: "
        "share of the facts' values that an answer contains, in percent, and the difference from "
        "the full cache's answer in points. Same: tokens before the first that differs from the "
        "full cache's answer, median. Means over contexts with 95% bootstrap intervals; excess and "
        f"difference context by context. In decode: an eviction every {result['interval']} tokens.",
        "",
        f"{counted['evictions_prefill']} evictions after prefill ({expected['evictions_prefill']} "
        f"expected), {counted['evictions_decode']} in decode (at least "
        f"{expected['evictions_decode']} expected).",
        *(f"\n{note}" for note in result["notes"]),
        "",
        row("policy", "budget", f"NLL, {first}", "NLL", f"excess, {first}", "excess", "facts",
            "difference", "same"),
        row("---", *["---:"] * 8),
    ]  # fmt: skip
    for entry in result["cells"]:
        paired = ["-"] * 3
        if entry["budget"]:
            paired = [
                _nats(entry["excess_first"], "+"), _nats(entry["excess"], "+"),
                points(Estimate(**entry["share_difference"])),
            ]  # fmt: skip
        lines.append(
            row(
                entry["label"], entry["budget"] or "-", _nats(entry["nll_first"]),
                _nats(entry["nll"]), *paired[:2], percent(Estimate(**entry["share"])), paired[2],
                f"{entry['same_tokens']:.0f}" if entry["budget"] else "-",
            )
        )  # fmt: skip
    return "\n".join([*lines, ""])

"""Paired flips, beside all ways in which they could have fallen."""

from itertools import product

import pytest

from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.flips import Flips, flips
from benchmarks.quality.prompt import AWARE
from benchmarks.quality.results import summarize
from benchmarks.quality.table import markdown, paired


def test_flips_are_paired() -> None:
    assert flips([1, 1, 0, 0, 0.5, 1], [0, 1, 1, 0, 0.25]) == Flips(worse=2, better=1)


@pytest.mark.parametrize("worse, better", [(0, 0), (1, 0), (8, 0), (5, 2), (3, 3), (1, 9)])
def test_p_counts_splits_as_uneven(worse: int, better: int) -> None:
    count, far = worse + better, abs(worse - better)
    ways = list(product((-1, 1), repeat=count))
    assert Flips(worse, better).p == sum(abs(sum(way)) >= far for way in ways) / len(ways)


def test_flips_stand_beside_each_accuracy() -> None:
    """Of one cell that kvpress answered in part, and of one task with scores between 0 and 1."""
    cell, short = Cell(AWARE, "probe", "25%"), Cell(AWARE, "kvpress snapkv", "25%")
    scores = {
        FULL_CELL: {"s-niah": [1.0] * 6 + [0.0, 1.0], "mv-niah": [0.5, 1.0, 1.0, 1.0]},
        cell: {"s-niah": [0.0] * 6 + [0.0, 1.0], "mv-niah": [0.75, 0.5, 1.0, 0.0]},
        short: {"s-niah": [1.0, 0.0], "mv-niah": [0.5, 1.0]},
    }
    results = summarize(scores, threshold=0.5)
    kept = {(AWARE, "25%"): dict(tokens=10.0, point=40.0, covered=0.0)}
    rows = [line for line in markdown(results, kept).splitlines() if line.startswith("|  | ")]
    average, ours, theirs = rows[::2], rows[2::2], rows[3::2]
    assert "; -" not in average[0]
    assert ours[0].endswith("; -6 +0, **p 0.031** |") and ours[1].endswith("; -2 +1, p 1 |")
    assert theirs[0].endswith("; -1 +0, p 1 |") and theirs[1].endswith("; -0 +0, p 1 |")
    (entry,) = [
        one
        for one in results.as_json()["cells"]
        if (one["label"], one["task"]) == ("probe", "s-niah")
    ]
    assert (entry["worse"], entry["better"], entry["mcnemar_p"]) == (6, 0, 0.03125)


def test_only_uneven_flips_are_bold() -> None:
    assert paired(Flips(5, 0)) == "-5 +0, p 0.062"
    assert paired(Flips(0, 6)) == "-0 +6, **p 0.031**"

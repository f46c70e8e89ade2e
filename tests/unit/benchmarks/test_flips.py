"""Paired flips, beside all ways in which they could have fallen."""

from itertools import product

import pytest

from benchmarks.quality.flips import Flips, flips


def test_flips_are_paired() -> None:
    assert flips([1, 1, 0, 0, 0.5, 1], [0, 1, 1, 0, 0.25]) == Flips(worse=2, better=1)


@pytest.mark.parametrize("worse, better", [(0, 0), (1, 0), (8, 0), (5, 2), (3, 3), (1, 9)])
def test_p_counts_splits_as_uneven(worse: int, better: int) -> None:
    count, far = worse + better, abs(worse - better)
    ways = list(product((-1, 1), repeat=count))
    assert Flips(worse, better).p == sum(abs(sum(way)) >= far for way in ways) / len(ways)

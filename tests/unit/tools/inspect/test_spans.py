"""The most kept spans, and positions as ranges."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.tools.inspect.spans import Span, most_kept, ranges


def test_neighbours_are_merged_and_the_most_kept_comes_first() -> None:
    counts = np.array([0, 1, 0, 4, 8, 6, 3, 0, 0, 2, 2, 0])
    assert most_kept(counts, 8, limit=3) == [
        Span(3, 6, 18 / 24),
        Span(6, 7, 3 / 8),
        Span(9, 11, 2 / 8),
    ]


def test_of_equally_kept_runs_the_longest_come_first() -> None:
    counts = np.array([2, 0, 2, 2, 0, 2, 2, 2, 0])
    assert most_kept(counts, 2, limit=2) == [Span(2, 4, 1.0), Span(5, 8, 1.0)]


def test_limit_and_width() -> None:
    counts = np.tile([5, 4], 50)
    assert most_kept(counts, 10, limit=2, widest=20) == [Span(0, 20, 0.45), Span(20, 40, 0.45)]
    run = np.full(100, 5)
    assert most_kept(run, 10, widest=20) == [Span(0, 100, 0.5)]
    assert most_kept(counts, 10, limit=0) == []
    assert most_kept(np.zeros(9, dtype=np.int64), 10) == []
    assert most_kept(np.empty(0, dtype=np.int64), 10) == []


@given(st.lists(st.integers(0, 16), max_size=80), st.integers(0, 9), st.integers(1, 12))
def test_spans_are_disjoint_and_hold_the_peaks(values, limit, widest) -> None:
    counts = np.array(values, dtype=np.int64)
    spans = most_kept(counts, 16, limit, widest)
    covered = [p for span in spans for p in range(span.start, span.stop)]
    assert len(spans) <= limit
    assert len(covered) == len(set(covered))
    assert all(counts[p] > 0 for p in covered)
    for span in spans:
        inside = counts[span.start : span.stop]
        assert len(inside) <= widest or (inside == inside[0]).all()
    assert [span.share for span in spans] == sorted((s.share for s in spans), reverse=True)
    for span in spans:
        inside = counts[span.start : span.stop]
        assert span.share == inside.mean() / 16
        assert inside.min() * 2 >= inside.max()
    outside = np.delete(counts, covered)
    if spans and outside.size:
        assert outside.max() <= min(counts[s.start : s.stop].max() for s in spans)
    if len(spans) < limit:
        assert len(covered) == (counts > 0).sum()


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_exactly_the_positions(positions) -> None:
    pairs = ranges(np.array(sorted(positions), dtype=np.int64))
    assert [p for start, stop in pairs for p in range(start, stop)] == sorted(positions)
    assert all(stop < start for (_, stop), (start, _) in pairwise(pairs))

"""The stretches of a prompt that most KV heads kept."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Span:
    """Positions [start, stop); ``share`` is the mean share of all KV heads that hold them."""

    start: int
    stop: int
    share: float


def most_kept(
    counts: NDArray[np.int64], num_heads: int, limit: int = 8, widest: int = 32
) -> list[Span]:
    """The most kept spans, the most kept first.

    A span starts from the longest run of positions that the most heads hold, and takes in its
    neighbours as long as at least half as many heads hold them; the next one is looked for
    outside of it.

    Args:
        counts: [n]: how many heads hold a position.
        num_heads: KV heads of all layers together.
        limit: Most spans to return.
        widest: Neighbours are taken in up to this width.

    """
    left = counts.copy()
    spans: list[Span] = []
    while len(spans) < limit and left.size and left.max() > 0:
        peak = int(left.max())
        start, stop = max(ranges(np.flatnonzero(left == peak)), key=lambda run: run[1] - run[0])
        floor = peak / 2
        while stop - start < widest:
            before = left[start - 1] if start else 0
            after = left[stop] if stop < len(left) else 0
            if max(before, after) < floor or max(before, after) == 0:
                break
            if before > after:
                start -= 1
            else:
                stop += 1
        spans.append(Span(start, stop, float(counts[start:stop].mean()) / num_heads))
        left[start:stop] = 0
    return sorted(spans, key=lambda span: (-span.share, span.start))


def ranges(positions: NDArray[np.int64]) -> list[list[int]]:
    """Ascending positions as [start, stop) pairs."""
    if not len(positions):
        return []
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    runs = np.split(positions, cuts)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs]

"""Shares that cost answers least: the next tokens go to the head they are worth most to."""

from collections.abc import Sequence
from itertools import pairwise

import torch

LEVELS = (1 / 40, 1 / 10, 1 / 4, 1 / 2)
"""Shares of its tokens that a head keeps when its cost is measured. All of them cost nothing."""


def divide(costs: torch.Tensor, mean: float) -> torch.Tensor:
    """What each head keeps, so that the sum of what they cost is the least.

    Each head's costs are replaced by the highest convex curve below them, whose steps are then
    taken in the order of what a token gains. A head keeps the first of :data:`LEVELS` at least.

    Args:
        costs: [L, H, len(LEVELS)] float: what a head costs that keeps this share of its tokens.
            What the least of a layer costs is taken for rounding, and subtracted.
        mean: Share of the tokens that heads keep on average, in (LEVELS[0], 1].

    Returns:
        [L, H] float64 of mean ``mean``, in [LEVELS[0], 1].

    """
    costs = costs.double() - costs.double().flatten(1).amin(1)[:, None, None]
    steps = [
        (slope, head, length)
        for head, row in enumerate(costs.flatten(0, 1).tolist())
        for slope, length in _convex(row)
    ]
    kept = torch.full((costs.shape[0] * costs.shape[1],), LEVELS[0], dtype=torch.float64)
    left = (mean - LEVELS[0]) * len(kept)
    for _, head, length in sorted(steps):
        taken = min(length, left)
        kept[head] += taken
        left -= taken
    return kept.view(costs.shape[:2])


def _convex(costs: Sequence[float]) -> list[tuple[float, float]]:
    """Slopes, rising, and lengths of the highest convex curve below a head's costs."""
    points = [*zip(LEVELS, costs, strict=True), (1.0, 0.0)]
    hull = points[:1]
    for point in points[1:]:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return [(_slope(a, b), b[0] - a[0]) for a, b in pairwise(hull)]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])

"""Shares by cost, beside every division of a small budget."""

from itertools import product

import pytest
import torch

from vllm_kvevict.calibrate.divide import LEVELS, divide


@pytest.mark.parametrize("seed", range(5))
def test_no_division_at_the_measured_levels_costs_less(seed):
    """Convex costs: the divided budget costs no more than any division that keeps as much."""
    steps = torch.rand((2, len(LEVELS)), generator=torch.Generator().manual_seed(seed))
    ends = torch.tensor([*LEVELS, 1.0], dtype=torch.float64)
    slopes = steps.double().sort(dim=-1, descending=True).values
    costs = (slopes * ends.diff()).flip(-1).cumsum(-1).flip(-1)
    # A head that costs nothing: what is subtracted is 0.
    costs = torch.cat([costs, torch.zeros(1, len(LEVELS), dtype=torch.float64)])
    points = torch.cat([costs, torch.zeros(3, 1, dtype=torch.float64)], 1)

    def cost(kept):
        total = 0.0
        for row, at in zip(points, kept, strict=True):
            right = min(int(torch.searchsorted(ends, at)), len(LEVELS))
            left = max(right - 1, 0)
            width = float(ends[right] - ends[left])
            part = float(at - ends[left]) / width if width else 0.0
            total += float(row[left] + part * (row[right] - row[left]))
        return total

    for choice in product(range(len(ends)), repeat=3):
        other = ends[list(choice)]
        kept = divide(costs[None], float(other.mean())).flatten()
        assert float(kept.mean()) == pytest.approx(float(other.mean()))
        assert kept.min() >= LEVELS[0] and kept.max() <= 1 + 1e-9
        assert cost(kept) <= cost(other) + 1e-9


def test_the_head_that_costs_most_keeps_everything():
    costs = torch.full((2, 2, len(LEVELS)), 1e-3)
    costs[1, 0] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    kept = divide(costs, 0.4)
    assert kept[1, 0] == pytest.approx(1.0)
    assert kept.mean() == pytest.approx(0.4)

"""Greedy k-center: its guarantee, and inputs that are no numbers."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.ops.torch.centers import choose_centers, greedy_centers


def everything(points: torch.Tensor) -> torch.Tensor:
    return torch.ones(points.shape[:2], dtype=torch.bool)


def radius(points: list[list[float]], centers) -> float:
    return max(min(math.dist(point, points[c]) for c in centers) for point in points)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 2**31), st.data())
def test_never_twice_as_far_as_the_best_centers(count, size, seed, data):
    points = torch.randn(1, count, size, generator=torch.Generator().manual_seed(seed))
    k = data.draw(st.integers(1, count))
    mine = greedy_centers(points, everything(points), k)[0].tolist()
    rows = points[0].double().tolist()
    least = min(radius(rows, chosen) for chosen in combinations(range(count), k))
    assert radius(rows, mine) <= 2 * least + 1e-6


def test_one_center_for_each_cluster():
    generator = torch.Generator().manual_seed(3)
    middles = 100 * torch.randn(7, 16, generator=generator)
    member = torch.arange(700) % 7
    points = (middles[member] + torch.randn(700, 16, generator=generator))[None]
    chosen = greedy_centers(points, everything(points), 7)[0]
    assert sorted(member[chosen].tolist()) == list(range(7))


def test_equal_points_are_chosen_once_each_from_the_first():
    points = torch.zeros(2, 5, 3)
    valid = torch.tensor([[True] * 5, [False, True, True, True, True]])
    assert greedy_centers(points, valid, 4).tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_points_that_are_no_numbers(odd):
    points = torch.tensor([[[0.0], [odd], [1.0], [5.0]], [[odd], [2.0], [1.0], [5.0]]])
    for row in greedy_centers(points, everything(points), 4).tolist():
        assert sorted(row) == [0, 1, 2, 3]
    if math.isnan(odd):
        assert greedy_centers(points[:1], everything(points[:1]), 3).tolist() == [[0, 3, 2]]


def test_none_and_too_many():
    points = torch.zeros(2, 3, 1)
    valid = torch.tensor([[True, True, True], [False, True, True]])
    assert greedy_centers(points, valid, 0).shape == (2, 0)
    with pytest.raises(ValueError, match="fewer than 3 points"):
        greedy_centers(points, valid, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operation_of_a_cpu_is_the_reference(dtype):
    points = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(5)).to(dtype)
    valid = everything(points)
    assert torch.equal(choose_centers(points, valid, 9), greedy_centers(points.float(), valid, 9))
    fake = choose_centers(points.to("meta"), valid.to("meta"), 9)
    assert fake.shape == (2, 9) and fake.dtype == torch.int64

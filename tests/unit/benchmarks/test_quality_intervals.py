"""Confidence intervals against their definitions and against simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality.intervals import (
    Z95,
    bootstrap,
    estimate,
    estimate_average,
    estimate_difference,
    wilson,
)


def normal_tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2))


def edge(share: float, n: int, inside: float, outside: float) -> float:
    """The p between two where the score test of p just rejects, by bisection."""
    for _ in range(200):
        middle = (inside + outside) / 2
        if abs(share - middle) <= Z95 * math.sqrt(middle * (1 - middle) / n):
            inside = middle
        else:
            outside = middle
    return inside


def test_z_is_the_quantile():
    assert normal_tail(Z95) == pytest.approx(0.025, abs=1e-12)


@given(n=st.integers(1, 400), data=st.data())
def test_wilson_inverts_the_score_test(n, data):
    successes = data.draw(st.integers(0, n))
    low, high = wilson(successes, n)
    share = successes / n
    assert low == pytest.approx(edge(share, n, share, 0.0) if successes else 0.0, abs=1e-9)
    assert high == pytest.approx(edge(share, n, share, 1.0) if successes < n else 1.0, abs=1e-9)


def test_wilson_covers_the_truth():
    rng, truth = np.random.default_rng(1), 0.93
    draws = rng.binomial(200, truth, size=4000)
    covered = np.mean([low <= truth <= high for low, high in (wilson(int(k), 200) for k in draws)])
    assert 0.93 < covered < 0.97


def test_bootstrap_agrees_with_the_central_limit():
    rng = np.random.default_rng(2)
    values = rng.beta(2, 1, size=800)
    low, high = bootstrap([values])
    half = Z95 * values.std() / math.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_average_gives_each_task_the_same_weight():
    found = estimate_average([[1.0] * 10, [0.0] * 1000])
    assert (found.mean, found.n) == (0.5, 1010)
    assert found.low == pytest.approx(0.5 - (1 - wilson(10, 10)[0]) / 2)
    assert found.high == pytest.approx(0.5 + wilson(0, 1000)[1] / 2)


def test_average_covers_the_truth_near_the_end_of_the_scale():
    """Where many resamples of a bootstrap would all be 1."""
    rng, truths, n = np.random.default_rng(5), (0.99, 0.995, 0.98), 100
    covered = 0
    for _ in range(600):
        groups = [list((rng.uniform(size=n) < truth).astype(float)) for truth in truths]
        found = estimate_average(groups)
        covered += found.low <= np.mean(truths) <= found.high
    assert covered / 600 > 0.93


def test_average_adds_the_variances_of_the_tasks():
    rng = np.random.default_rng(3)
    groups = [rng.uniform(size=n) for n in (300, 900)]
    found = estimate_average([list(group) for group in groups])
    half = Z95 * math.sqrt(sum(group.var() / len(group) for group in groups)) / 2
    assert found.high - found.low == pytest.approx(2 * half, rel=0.08)


def test_estimate_picks_wilson_for_hits_and_misses():
    hits = [1.0] * 190 + [0.0] * 10
    assert (estimate(hits).low, estimate(hits).high) == wilson(190, 200)
    shares = [0.25, 0.5, 0.75, 1.0] * 50
    assert (estimate(shares).low, estimate(shares).high) == bootstrap([shares])


def test_difference_is_paired():
    rng = np.random.default_rng(4)
    base = rng.uniform(size=200)
    same = estimate_difference([list(base)], [list(base)])
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    shifted = estimate_difference([list(base + 0.1)], [list(base)])
    assert shifted.low == pytest.approx(0.1) and shifted.high == pytest.approx(0.1)

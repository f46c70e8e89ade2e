"""Means with 95% confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054
"""Two-sided 95% quantile of the standard normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` values and its 95% confidence interval."""

    mean: float
    low: float
    high: float
    n: int


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927). Holds at 0 and 1 as well."""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} successes in {n} trials")
    share, z2 = successes / n, Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * np.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low = 0.0 if successes == 0 else float(centre - half)
    high = 1.0 if successes == n else float(centre + half)
    return low, high


def bootstrap(
    groups: Sequence[Sequence[float]], seed: int = 0, resamples: int = 5000
) -> tuple[float, float]:
    """95% percentile interval of the mean over groups of each group's mean.

    Samples are drawn with replacement inside each group, so that every group keeps its weight.
    """
    rng = np.random.default_rng(seed)
    means = np.zeros(resamples)
    for group in groups:
        values = np.asarray(group, dtype=np.float64)
        draws = rng.integers(0, len(values), (resamples, len(values)), dtype=np.int32)
        means += values[draws].mean(1) / len(groups)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def estimate(scores: Sequence[float]) -> Estimate:
    """Mean of scores in [0, 1]: Wilson where all are 0 or 1, bootstrap otherwise."""
    if set(scores) <= {0.0, 1.0}:
        low, high = wilson(round(sum(scores)), len(scores))
    else:
        low, high = bootstrap([scores])
    return Estimate(float(np.mean(scores)), low, high, len(scores))


def estimate_average(groups: Sequence[Sequence[float]]) -> Estimate:
    """Unweighted mean of the groups' means, with a bootstrap interval over samples."""
    low, high = bootstrap(groups)
    mean = float(np.mean([np.mean(group) for group in groups]))
    return Estimate(mean, low, high, sum(map(len, groups)))


def estimate_difference(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> Estimate:
    """Average of ``ours - theirs`` over groups, sample by sample: both answered the same ones."""
    paired = [
        [a - b for a, b in zip(first, second, strict=True)]
        for first, second in zip(ours, theirs, strict=True)
    ]
    return estimate_average(paired)

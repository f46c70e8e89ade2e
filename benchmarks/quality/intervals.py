"""Means with 95% confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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


@lru_cache(maxsize=64)
def _weights(n: int, seed: int, resamples: int) -> np.ndarray:
    """[resamples, n]: how often each of n samples is drawn, as shares of n."""
    rng = np.random.default_rng(seed)
    return (rng.multinomial(n, [1 / n] * n, size=resamples) / n).astype(np.float32)


def bootstrap(
    groups: Sequence[Sequence[float]], seed: int = 0, resamples: int = 5000
) -> tuple[float, float]:
    """95% percentile interval of the mean over groups of each group's mean.

    Samples are drawn with replacement inside each group, so that every group keeps its weight.
    """
    means = np.zeros(resamples)
    for index, group in enumerate(groups):
        values = np.asarray(group, dtype=np.float32)
        means += _weights(len(values), seed + index, resamples) @ values / len(groups)
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
    """Unweighted mean of the groups' means, from the intervals of the groups.

    The distances from mean to limit add up in quadrature (MOVER; Zou and Donner, Statistics in
    Medicine 27, 2008). A bootstrap would claim certainty where every sample scores alike.
    """
    found = [estimate(group) for group in groups]
    mean = float(np.mean([one.mean for one in found]))
    below = math.hypot(*(one.mean - one.low for one in found)) / len(found)
    above = math.hypot(*(one.high - one.mean for one in found)) / len(found)
    return Estimate(mean, mean - below, mean + above, sum(map(len, groups)))


def estimate_difference(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> Estimate:
    """Average of ``ours - theirs`` over groups, sample by sample, as far as both answered.

    The interval is a bootstrap over samples inside each group.
    """
    paired = [
        [a - b for a, b in zip(first, second, strict=False)]
        for first, second in zip(ours, theirs, strict=True)
    ]
    mean = float(np.mean([np.mean(group) for group in paired]))
    return Estimate(mean, *bootstrap(paired), sum(map(len, paired)))

"""Paired flips: whose answers an eviction turned wrong, and whose right."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Flips:
    """Samples that score less and more than with the full cache, and McNemar's exact p."""

    worse: int
    better: int

    @property
    def p(self) -> float:
        """Two-sided: chance of so uneven a split where both ways are as likely."""
        count = self.worse + self.better
        few = min(self.worse, self.better)
        return min(1.0, 2 * sum(comb(count, k) for k in range(few + 1)) / 2**count)


def flips(full: Sequence[float], other: Sequence[float]) -> Flips:
    """Compare scores of the same samples; ``other`` may hold the first ones only."""
    pairs = list(zip(full, other, strict=False))
    return Flips(sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))

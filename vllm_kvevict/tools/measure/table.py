"""Shares of right answers with their intervals."""

import math
from collections.abc import Iterator, Sequence

NORMAL = 1.96
"""Standard deviations that 95% of a normal distribution lie within."""


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95% interval of a share, by Wilson's formula."""
    share = right / count
    middle = (share + NORMAL**2 / (2 * count)) / (1 + NORMAL**2 / count)
    half = math.sqrt(share * (1 - share) / count + NORMAL**2 / (4 * count**2))
    half *= NORMAL / (1 + NORMAL**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def lines(rows: Sequence[tuple[str, str, Sequence[bool], Sequence[bool]]]) -> Iterator[str]:
    """Return a table.

    Args:
        rows: Budget, scenario, whether each question was answered right, and whether it was with
            the full cache.

    """
    head = "kept", "question", "right", "95%", "lost", "gained"
    cells = [head]
    for budget, scenario, right, full in rows:
        low, high = wilson(sum(right), len(right))
        pairs = list(zip(right, full, strict=True))
        cells.append(
            (
                budget,
                scenario,
                f"{sum(right)} of {len(right)}",
                f"[{100 * low:.0f}, {100 * high:.0f}]",
                str(sum(b and not a for a, b in pairs)),
                str(sum(a and not b for a, b in pairs)),
            )
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))

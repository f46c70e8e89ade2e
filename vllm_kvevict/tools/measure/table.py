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


SMALL = 0.05
"""Share of the questions that a budget may lose on balance and still be advised."""

ENOUGH = 30
"""Questions below which the advice is a hint."""


def advice(rows: Sequence[tuple[str, str, Sequence[bool], Sequence[bool]]]) -> str:
    """Return one sentence that says which budget to take.

    It is the smallest at which at most :data:`SMALL` of the questions are lost on balance, known at
    the eviction and not known.

    Args:
        rows: As for :func:`lines`, the full cache first, then budgets from the largest to the
            smallest.

    """
    (_, _, full, _), *others = rows
    lost: dict[str, float] = {}
    for budget, _, right, _ in others:
        lost[budget] = max(lost.get(budget, 0.0), (sum(full) - sum(right)) / len(full))
    fitting = [budget for budget, share in lost.items() if share <= SMALL]
    few = "" if len(full) >= ENOUGH else f" (a hint: {len(full)} questions are few)"
    if not any(full):
        return "The full cache answers none of the questions, so they say nothing about budgets."
    if not fitting:
        return (
            f"Take none of these budgets: each loses more than {SMALL:.0%} of the questions; try a "
            f"larger one, or calibrate the model{few}."
        )
    best = fitting[-1]
    return (
        f"Take --kv-eviction-budget {best}: it loses at most {max(lost[best], 0):.0%} of the "
        f"questions on balance{few}."
    )

"""The arithmetic: divergence, rank correlation, and what a cell comes to."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

HIGH, LOW = 0.3, 0.03
"""Nats: an answer above the first whose audit is below the second has slipped through."""

Row = dict[str, Any]
"""One prompt at one budget: ``policy``, ``kind``, ``budget``, ``audit``, ``answer``, ..."""


def divergence(full: torch.Tensor, left: torch.Tensor) -> float:
    """Mean over rows of KL divergence in nats, ``sum(p * log(p / q))``.

    Args:
        full: [N, V] logits over the full cache, which p is of.
        left: [N, V] logits over what an eviction left.

    """
    p, q = full.double().log_softmax(-1), left.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    array = np.asarray(values, dtype=float)
    order = array.argsort(kind="stable")
    _, group, counts = np.unique(array, return_inverse=True, return_counts=True)
    placed = np.empty(len(array))
    placed[order] = np.arange(1, len(array) + 1)
    return (np.bincount(group, placed) / counts)[group]


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Rank correlation of two columns; None where one of them does not vary."""
    if len(one) < 2 or len(set(one)) < 2 or len(set(other)) < 2:
        return None
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def slipped(rows: Sequence[Row]) -> tuple[int, int]:
    """Answers above :data:`HIGH`, and how many of them had an audit below :data:`LOW`."""
    high = [row for row in rows if row["answer"] > HIGH]
    return len(high), sum(row["audit"] < LOW for row in high)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """What some rows come to; there must be one."""
    above, missed = slipped(rows)
    audit, answer = ([row[name] for row in rows] for name in ("audit", "answer"))
    return {
        "prompts": len(rows),
        "kept": float(np.mean([row["kept"] for row in rows])),
        "audit_mean": float(np.mean(audit)),
        "answer_mean": float(np.mean(answer)),
        "answer_worst": max(answer),
        "above": above,
        "missed": missed,
        "below": sum(one < LOW for one in audit),
        "spearman": spearman(audit, answer),
    }


def cells(rows: Sequence[Row], names: Sequence[str]) -> list[dict[str, Any]]:
    """A summary for each combination of the named fields, in the order in which they come."""
    key: Callable[[Row], tuple[Any, ...]] = lambda row: tuple(row[name] for name in names)  # noqa: E731
    found = []
    for values in dict.fromkeys(map(key, rows)):
        mine = [row for row in rows if key(row) == values]
        found.append(dict(zip(names, values, strict=True)) | summary(mine))
    return found


def within(found: Sequence[dict[str, Any]]) -> float | None:
    """Mean of the rank correlations of cells: what is left of one where all else is the same."""
    each = [one["spearman"] for one in found if one["spearman"] is not None]
    return float(np.mean(each)) if each else None

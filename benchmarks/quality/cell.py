"""A cell of the result table, and the scores that fill it."""

from dataclasses import dataclass

FULL = "full cache"


@dataclass(frozen=True)
class Cell:
    """What a request was answered under. ``label`` names policy and implementation.

    The full cache has neither scenario nor budget: both are empty.
    """

    scenario: str
    label: str
    budget: str


FULL_CELL = Cell("", FULL, "")

Scores = dict[Cell, dict[str, list[float]]]
"""Scores in [0, 1] by cell and task; the n-th score of a task is always the same sample's.

kvpress may have answered only the first samples."""

"""From scores to what is reported: estimates, averages over tasks, paired differences."""

from dataclasses import asdict, dataclass, field

from benchmarks.quality.cell import FULL_CELL, Cell, Scores
from benchmarks.quality.flips import Flips, flips
from benchmarks.quality.intervals import (
    Estimate,
    estimate,
    estimate_average,
    estimate_difference,
)
from benchmarks.quality.kvpress_baseline import PREFIX

AVERAGE = "average"


@dataclass(frozen=True)
class Results:
    """Estimates by cell and task, the average over the tasks under :data:`AVERAGE`.

    ``left_out`` are tasks that the model does not do with its full cache, with that accuracy.
    """

    tasks: tuple[str, ...]
    left_out: dict[str, Estimate]
    estimates: dict[Cell, dict[str, Estimate]]
    differences: dict[tuple[Cell, Cell], Estimate]
    flips: dict[tuple[Cell, str], Flips] = field(default_factory=dict)

    @property
    def full(self) -> dict[str, Estimate]:
        return self.estimates[FULL_CELL]

    def labels(self, scenario: str) -> list[str]:
        found = [cell.label for cell in self.estimates if cell.scenario == scenario]
        return list(dict.fromkeys(found))

    def budgets(self) -> list[str]:
        return list(dict.fromkeys(cell.budget for cell in self.estimates if cell.budget))

    def as_json(self) -> dict:
        """Plain data: one entry per cell and task."""
        return {
            "tasks": list(self.tasks),
            "left_out": {task: asdict(found) for task, found in self.left_out.items()},
            "cells": [
                {**asdict(cell), "task": task, **_rounded(found), **self._flips(cell, task)}
                for cell, row in self.estimates.items()
                for task, found in row.items()
            ],
            "differences": [
                {
                    "scenario": first.scenario,
                    "budget": first.budget,
                    "difference": f"{first.label} - {second.label}",
                    **_rounded(found),
                }
                for (first, second), found in self.differences.items()
            ],
        }

    def _flips(self, cell: Cell, task: str) -> dict[str, float]:
        found = self.flips.get((cell, task))
        return {} if found is None else {**asdict(found), "mcnemar_p": round(found.p, 5)}


def _rounded(found: Estimate) -> dict[str, float]:
    return {key: round(value, 5) for key, value in asdict(found).items()}


def summarize(scores: Scores, threshold: float) -> Results:
    """Estimates of every cell; tasks below ``threshold`` with the full cache are left out.

    Raises:
        ValueError: Not one task reaches the threshold.

    """
    full = {task: estimate(values) for task, values in scores[FULL_CELL].items()}
    tasks = tuple(task for task, found in full.items() if found.mean >= threshold)
    left_out = {task: found for task, found in full.items() if task not in tasks}
    if not tasks:
        raise ValueError(
            f"no task reaches {threshold:.0%} with the full cache: "
            + ", ".join(f"{task} {found.mean:.1%}" for task, found in full.items())
            + "; the answers are kept, and the same command with --resume and a lower --threshold"
            " writes their table"
        )
    estimates = {}
    for cell, by_task in scores.items():
        row = {task: estimate(by_task[task]) for task in tasks}
        estimates[cell] = row | {AVERAGE: estimate_average([by_task[task] for task in tasks])}
    differences = {
        (first, second): estimate_difference(
            [scores[first][task] for task in tasks], [scores[second][task] for task in tasks]
        )
        for first, second in _pairs(scores)
    }
    flipped = {
        (cell, task): flips(scores[FULL_CELL][task], by_task[task])
        for cell, by_task in scores.items()
        if cell.scenario
        for task in tasks
    }
    return Results(tasks, left_out, estimates, differences, flipped)


def _pairs(scores: Scores) -> list[tuple[Cell, Cell]]:
    """Adaptive against uniform, and ours against kvpress, at the same budget and scenario."""
    wanted = []
    for cell in scores:
        base, comma, variant = cell.label.partition(",")
        if base.split()[-1].startswith("ada-"):
            wanted.append((cell, base.replace("ada-", "") + comma + variant))
        if not base.startswith(PREFIX):
            wanted.append((cell, PREFIX + base))
    pairs = [(cell, Cell(cell.scenario, label, cell.budget)) for cell, label in wanted]
    return [(first, second) for first, second in pairs if second in scores]

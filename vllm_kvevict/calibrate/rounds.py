"""How many lessons networks learn from: as many as help, or as the time allows."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvevict.calibrate import BEGAN
from vllm_kvevict.calibrate.lessons import Lesson

FIRST = 30
"""Lessons after which networks are judged for the first time, then after each doubling."""

HELD = 6
"""One of so many of the first lessons judges the networks, always the same ones, so that errors
compare; fewer lessons teach linear probes."""

GAIN = 0.02
"""Relative fall of the held-out error by a doubling of the lessons, below which no more help."""

LEAST_LESSONS = 12
"""Lessons that are learned even if the time is up."""


@dataclass
class Taught:
    """The lessons that a profile was learned from.

    Args:
        planned: Lessons that were there.
        learned: Lessons that were learned, those that judge included.
        stopped: "time" or "error" if not all were learned because of one of these; else None.
        errors: Lessons and held-out error of the networks at that time.

    """

    planned: int
    learned: int = 0
    stopped: str | None = None
    errors: list[tuple[int, float]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the entry ``made.lessons`` of a profile."""
        errors = [[count, round(error, 4)] for count, error in self.errors]
        return vars(self) | {"errors": errors}


def has_networks(lessons: int) -> bool:
    """Return whether so many lessons are enough for networks."""
    return lessons >= HELD


def elapsed() -> float:
    """Seconds since calibrate began."""
    return time.monotonic() - BEGAN


def teach(model: Any, lessons: Sequence[Lesson], latest: float, progress: Any) -> Taught:
    """Learn from lessons until the held-out error stops falling, or the time is up.

    Args:
        model: Learns from lessons and judges networks.
        lessons: Every :data:`HELD`-th of the first :data:`FIRST` judges.
        latest: Seconds of :func:`elapsed` at which no other lesson begins.
        progress: Shows a bar.

    """
    found, networks, check = Taught(len(lessons)), has_networks(len(lessons)), FIRST
    for index, lesson in enumerate(progress(lessons, "probes")):
        if index >= LEAST_LESSONS and elapsed() > latest:
            found.stopped = "time"
            break
        held = index % HELD == 0 and index < FIRST if networks else None
        model.learn(lesson, held, len(lessons))
        found.learned = count = index + 1
        if not networks or count != check or count == len(lessons):
            continue
        found.errors.append((count, model.judge()))
        print(_sentence(found.errors), file=sys.stderr, flush=True)
        if len(found.errors) > 1 and _gain(found.errors) < GAIN * found.errors[-2][1]:
            found.stopped = "error"
            break
        check *= 2
    return found


def _gain(errors: Sequence[tuple[int, float]]) -> float:
    return errors[-2][1] - errors[-1][1]


def _sentence(errors: Sequence[tuple[int, float]]) -> str:
    (count, error), said = errors[-1], ""
    if len(errors) > 1:
        gain = _gain(errors)
        said = f", {gain:.3f} less than after {errors[-2][0]}; {count} more texts are expected to "
        said += f"lower it by at most {max(0.0, gain):.3f}"
    return f"after {count} texts the held-out error of the networks is {error:.3f}{said}"

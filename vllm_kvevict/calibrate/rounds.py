"""How many lessons networks learn from: as many as help, or as the time allows."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvevict.calibrate import BEGAN
from vllm_kvevict.calibrate.lessons import Lesson

HELD, MOST_JUDGES = 6, 12
"""One of so many lessons judges the networks, up to a number; fewer lessons teach linear probes."""

FIRST = 30
"""Lessons after which networks are judged for the first time, then after each doubling."""

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


def judges_of(lessons: int) -> int:
    """Return how many of the first lessons judge networks; 0 if there are too few for networks."""
    return min(lessons // HELD, MOST_JUDGES)


def elapsed() -> float:
    """Seconds since calibrate began."""
    return time.monotonic() - BEGAN


def teach(model: Any, lessons: Sequence[Lesson], latest: float, progress: Any) -> Taught:
    """Learn from lessons until the held-out error stops falling, or the time is up.

    Args:
        model: Learns from lessons and judges networks.
        lessons: The first ones judge.
        latest: Seconds of :func:`elapsed` at which no other lesson begins.
        progress: Shows a bar.

    """
    found, judges, check = Taught(len(lessons)), judges_of(len(lessons)), FIRST
    for index, lesson in enumerate(progress(lessons, "probes")):
        if index >= LEAST_LESSONS and elapsed() > latest:
            found.stopped = "time"
            break
        model.learn(lesson, index < judges if judges else None, len(lessons))
        found.learned = count = index + 1
        if not judges or count != check or count == len(lessons):
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
        said = f", {gain:.3f} less than after {errors[-2][0]}; {count} more are expected to gain "
        said += f"at most as much, and are not learned if this is below {GAIN:.0%}"
    return f"after {count} lessons the held-out error of networks is {error:.3f}{said}"

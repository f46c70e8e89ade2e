"""Lessons are learned until the held-out error stops falling, or the time is up."""

from typing import Any

import pytest

from vllm_kvevict.calibrate import rounds
from vllm_kvevict.calibrate.lessons import AFTER, TURN, Lesson
from vllm_kvevict.calibrate.rounds import LEAST_LESSONS, teach


class Model:
    """Judges its networks by planted errors; a lesson takes a second."""

    def __init__(self, errors: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self._errors, self.held, self.now = iter(errors), list[bool | None](), 0.0
        monkeypatch.setattr(rounds, "elapsed", lambda: self.now)

    def learn(self, lesson: Lesson, held: bool | None, lessons: int) -> None:
        self.held.append(held)
        self.now += 1

    def judge(self) -> float:
        return next(self._errors)


def taught(model: Model, count: int, latest: float = 1e9) -> Any:
    return teach(model, [Lesson([1], [])] * count, latest, lambda some, name: some)


def test_all_are_learned_while_the_error_falls(monkeypatch, capsys) -> None:
    model = Model([0.8, 0.7, 0.6], monkeypatch)
    found = taught(model, 200)
    assert (found.learned, found.planned, found.stopped) == (200, 200, None)
    assert found.errors == [(30, 0.8), (60, 0.7), (120, 0.6)]
    judges = [index for index, held in enumerate(model.held) if held]
    assert judges == [0, 6, 12, 18, 24], "the same at each measurement, and of all kinds"
    assert {TURN[(index + index // AFTER) % len(TURN)] for index in judges} == set(TURN)
    assert "0.100 less than after 60" in capsys.readouterr().err
    assert found.to_json()["errors"][0] == [30, 0.8]


def test_an_error_that_stops_falling_ends_it(monkeypatch) -> None:
    model = Model([0.8, 0.7, 0.69], monkeypatch)
    found = taught(model, 1000)
    assert (found.learned, found.stopped) == (120, "error")


def test_the_time_ends_it_but_not_before_the_least(monkeypatch) -> None:
    found = taught(Model([0.8], monkeypatch), 100, latest=39.5)
    assert (found.learned, found.stopped) == (40, "time")
    found = taught(Model([], monkeypatch), 100, latest=-5)
    assert (found.learned, found.stopped) == (LEAST_LESSONS, "time")


def test_few_lessons_have_no_judges(monkeypatch) -> None:
    model = Model([], monkeypatch)
    assert taught(model, 5).stopped is None and model.held == [None] * 5
    model = Model([], monkeypatch)
    assert taught(model, 30).errors == [] and model.held.count(True) == 5

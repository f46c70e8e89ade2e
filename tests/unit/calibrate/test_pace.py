"""The expected duration of a calibration, beside a count of what a model is asked to run."""

import time
from typing import Any

import pytest
import torch

from vllm_kvevict.calibrate import BEGAN, learn, quality
from vllm_kvevict.calibrate.lessons import Later, Lesson
from vllm_kvevict.calibrate.pace import OF_LESSON, SCORED, TRAINED, sentence
from vllm_kvevict.calibrate.rounds import LEAST_LESSONS
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.serving.calibrate import ESTIMATE

CONTEXT_S, TEXT_S, SCORES_S = 5.7e-3, 14e-3, 0.5e-3
"""Seconds of a token, as of SmolLM2 on a CPU with AVX2."""


class Model:
    """Counts the seconds that its calls would take, on the clock of the code under test."""

    recent = 8
    losses = ()

    def __init__(self, layers: int, now: list[float]) -> None:
        self.layers, self._now = layers, now
        self._context = 0

    def _take(self, seconds: float) -> None:
        self._now[0] += seconds

    def hold(self, context: list[int]) -> None:
        self._context = len(context)
        self._take(CONTEXT_S * len(context))

    def lost(self, text: list[int], answer: int, trials: list[Any]) -> Any:
        rows = len(trials) + 1
        self._take(TEXT_S * len(text) * rows)
        return torch.full((len(trials),), 0.1), torch.ones(rows, dtype=torch.bool)

    def _lesson(self, lesson: Lesson) -> None:
        self._take(CONTEXT_S * len(lesson.context) * (1 + SCORED))
        self._take(OF_LESSON * TEXT_S * sum(len(one.ids) for one in lesson.later))

    def learn(self, lesson: Lesson, held: bool | None = None, lessons: int = 1) -> None:
        self._lesson(lesson)

    def captured(self, lesson: Lesson) -> torch.Tensor:
        self._lesson(lesson)
        return torch.linspace(0, 1, 128).expand(self.layers, 2, 128)

    def judge(self) -> float:
        self._take(TRAINED * CONTEXT_S * 1300)
        return 0.7

    def solve(self, prose: float) -> Any:
        self._take(TRAINED * CONTEXT_S * 1300)
        return type("Weights", (), {"arrays": ()})

    def use(self, share: float, tokens: int) -> None:
        pass

    def scores(self, joined: bool) -> None:
        self._take(SCORES_S * self._context)


def lesson(index: int) -> Lesson:
    later = [Later([1] * (25 + index % 5), 5, 15) for _ in range(6)] + [Later([1] * 80, 79)]
    return Lesson([1] * (1290 + index), later)


@pytest.mark.parametrize("layers", [30, 6])
def test_it_is_the_time_of_what_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, layers: int
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(learn, "Model", lambda *_: Model(layers, now))
    config = EvictionConfig.parse(dict(policy="probe", budget="12.5%"))
    assert config is not None
    texts, held_out = [lesson(i) for i in range(30)], [lesson(i) for i in range(8)]
    began: list[float] = []

    def progress(items: Any, name: str) -> Any:
        began.append(now[0])
        return items

    learn.learned(None, config, 2, texts, 6, 1.0, held_out, progress, 0.5)
    taken = now[0] - began[0]
    said = ESTIMATE.search(capsys.readouterr().err)
    assert said is not None
    # Real ones differ: machines scale otherwise with rows and tokens.
    assert int(said[1]) == pytest.approx(taken, rel=0.15)


def test_fewer_lessons_are_learned_if_not_all_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """All ends in the time that was given, and the estimate says so."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: BEGAN + now[0])
    monkeypatch.setattr(learn, "Model", lambda *_: Model(30, now))
    config = EvictionConfig.parse(dict(policy="probe", budget="12.5%"))
    assert config is not None
    texts, held_out = [lesson(i) for i in range(60)], [lesson(i) for i in range(8)]
    how = config, 2, texts, 6, 1.0, held_out, lambda items, _: items, 0.5
    counts = []
    for limit in (1e9, 1700, 1300, 100):
        now[0] = 0.0
        taught = learn.learned(None, *how, limit).taught
        estimate = ESTIMATE.search(capsys.readouterr().err)
        assert estimate is not None
        counts.append(taught.learned)
        assert taught.stopped == ("time" if taught.learned < 60 else None)
        if taught.learned > LEAST_LESSONS:
            assert now[0] < limit and int(estimate[1]) <= limit
        else:
            assert int(estimate[1]) > limit, "the server ends it"
    assert counts[0] == 60 and counts[0] > counts[1] > counts[2] > counts[3] == LEAST_LESSONS


def test_texts_without_questions_have_a_pace() -> None:
    now = [0.0]
    model = Model(30, now)
    texts = [Lesson([1] * 100, [Later([1] * 20, 19)])] * 4
    pace = quality.check(model, texts, 0.5)
    assert (pace.context_tokens, pace.text_tokens) == (100, 20), "one is enough"
    assert ESTIMATE.match(sentence(pace.parts(texts, [], texts, False, 0)))

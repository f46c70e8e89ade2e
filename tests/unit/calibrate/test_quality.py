"""A profile states its quality: compared with hand counts for a model with known losses."""

import random
from types import SimpleNamespace

import pytest
import torch

from benchmarks.quality.intervals import wilson as by_benchmarks
from vllm_kvevict.calibrate import quality
from vllm_kvevict.calibrate.lessons import Later, Lesson
from vllm_kvevict.calibrate.options import CalibrateError

LESSON = Lesson([1] * 100, [Later([2, 3, 4, 9], 2, 1), Later([2, 3, 5, 9], 2, 1), Later([7, 7], 1)])


class Losing:
    """Loses 1 / tokens kept, twice that by keys alone; half where the question is known."""

    recent = 8

    def __init__(self, answers_begin_with: int) -> None:
        self.right, self.held, self.joined, self.share = answers_begin_with, [], False, -1.0

    def hold(self, context) -> None:
        self.held = context

    def use(self, share: float, tokens: int) -> None:
        assert tokens == len(self.held)
        self.share = share

    def scores(self, joined: bool) -> None:
        assert (self.share > 0) == joined, "by keys alone, for questions alone"
        self.joined = joined

    def lost(self, text, answer, trials):
        known = len(self.held) > 100
        assert text[-answer:] and (not known or len(text) == 3)
        kept = [1 / (trial[0][0] + self.recent) for trial in trials]
        right = [text[-answer] == self.right] * (1 + len(trials))
        return torch.tensor(kept) * (1 if self.joined else 2) / (1 + known), torch.tensor(right)


def test_losses_and_answers_by_budget() -> None:
    found = quality.measured(Losing(4), torch.ones(1, 1), [LESSON, LESSON], lambda x, name: x)
    assert list(found) == ["full", "keys", "joined", "known"]
    assert found["full"][0] == 0.5, "of two questions one is answered; prose asks nothing"
    for name, times in (("keys", 2), ("joined", 1), ("known", 0.5)):
        row = found[name]
        assert row["answers"] == (6 if name == "joined" else 4)
        for at, kept in (("50.00%", 50), ("25.00%", 25), ("12.50%", 12), ("6.25%", 9)):
            # Contexts are 100 tokens long, and one more where they have the question.
            assert row[at]["kl"] == [pytest.approx(times / kept, rel=0.1)] * 3
            assert row[at]["right"][0] == 0.5


def test_intervals() -> None:
    rng = random.Random(0)
    answers = [quality.Answer(n % 8, n % 8 + rng.random(), n % 3 == 0) for n in range(48)]
    mean, low, high = quality.interval(answers)
    assert mean == pytest.approx(sum(one.kl for one in answers) / 48, abs=1e-4)
    # Contexts differ by 2.3 on average, answers within them do not: 8 contexts count, not 48.
    assert 1.1 < mean - low < 2 and 1.1 < high - mean < 2
    share, low, high = quality.wilson([*answers, quality.Answer(0, 0.0, None)])
    assert (low, high) == pytest.approx(by_benchmarks(16, 48), abs=1e-4)
    assert share == pytest.approx(1 / 3, abs=1e-4)
    assert quality.wilson([quality.Answer(0, 0.0, None)]) is None


def test_a_full_cache_must_answer_its_own_questions() -> None:
    quality.check(Losing(4), [LESSON, LESSON], 0.5)
    quality.check(Losing(0), [SimpleNamespace(context=[], later=[Later([1], 1)])], 0.5)
    with pytest.raises(CalibrateError, match=r"answers 2 of 4 questions .* 60% is needed"):
        quality.check(Losing(4), [LESSON, LESSON], 0.6)
    with pytest.raises(CalibrateError, match="answers 0 of 2 questions"):
        quality.check(Losing(0), [LESSON], 0.5)

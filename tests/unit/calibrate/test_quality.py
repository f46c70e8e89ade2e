"""A profile states its quality: compared with hand counts for a model with known losses."""

import math
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
        self.right, self.held, self.joined = answers_begin_with, [], False

    def hold(self, context) -> None:
        self.held = context

    def use(self, share: float, tokens: int) -> None:
        assert tokens == len(self.held)

    def scores(self, joined: bool) -> None:
        self.joined = joined

    def lost(self, text, answer, trials):
        known = len(self.held) > 100
        assert text[-answer:] and (not known or len(text) == 3)
        kept = [1 / (trial[0][0] + self.recent) for trial in trials]
        right = [text[-answer] == self.right] * (1 + len(trials))
        return torch.tensor(kept) * (1 if self.joined else 2) / (1 + known), torch.tensor(right)


def test_losses_and_answers_by_budget() -> None:
    found = quality.measured(
        Losing(4), torch.ones(1, 1), 0.125, [LESSON, LESSON], lambda x, name: x
    )
    assert list(found) == ["full", "keys", "joined", "known"]
    assert found["full"][0] == 0.5, "of two questions one is answered; prose asks nothing"
    for name, times in (("keys", 2), ("joined", 1), ("known", 0.5)):
        row = found[name]
        assert row["answers"] == (4 if name == "known" else 6)
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


@pytest.mark.parametrize("share", [0.0625, 0.125, 0.5, 0.75])
def test_counts_are_those_of_a_server(share) -> None:
    """As the rules of a server divide between layers, and its allocator between heads."""
    shares = torch.tensor([[0.1, 0.3], [1.0, 2.6], [1.5, 0.5]])
    shares /= shares.mean()
    length, recent = 1008, 8
    found = torch.tensor(quality.served_counts(shares, 0.125, share, length, recent)).double()
    by_layer = shares.mean(1).double()
    parts = by_layer * 0.125
    if share > 0.125:
        parts = parts ** (math.log(share) / math.log(0.125))
    kept = share * length - recent
    # The first layer keeps 1 token a head at least, and nobody reaches all of them.
    assert (found.mean(1) - parts / parts.mean() * kept).abs().max() <= 2
    assert found.sum() == pytest.approx(kept * 6, abs=6)
    wanted = shares / shares.mean(1, keepdim=True) * found.mean(1, keepdim=True)
    if share <= 0.5:
        assert (found - wanted).abs().max() <= 1
    else:
        assert found.max() == length - recent, "what a head cannot use goes to the others"

"""Shares follow what answers lose when a layer is cut while the others are cut, too."""

import pytest
import torch

from vllm_kvevict.calibrate.learn import CUT, FEW_LAYERS, by_effect
from vllm_kvevict.calibrate.lessons import Later, Lesson
from vllm_kvevict.config.config import EvictionConfig

CONFIG = EvictionConfig(policy="probe", budget="25%")
HEADS, LENGTH = 2, 800
ASKED = Lesson(list(range(LENGTH)), [Later([1, 2, 3], 1, 1), Later([4, 5], 1)])


class Model:
    """A model whose answers lose a planted amount for each token that a layer does not keep."""

    recent = 8

    def __init__(self, losses: list[float]) -> None:
        self.losses = torch.tensor(losses)
        self.asked = 0

    def use(self, share: float, tokens: int) -> None:
        assert 0 < share < 0.25 and tokens == LENGTH

    def hold(self, context: list[int]) -> None:
        assert len(context) == LENGTH

    def scores(self, joined: bool) -> None:
        assert not joined

    def lost(self, text, answer, trials):
        self.asked += 1
        kept = torch.tensor(trials).float().mean(-1)  # [trials, L]
        kl = ((LENGTH - kept) * self.losses).sum(-1)
        return kl, torch.ones(len(trials) + 1, dtype=torch.bool)


def shares_of(model, lessons=(ASKED, ASKED), shares=None):
    if shares is None:
        shares = torch.ones(len(model.losses), HEADS, dtype=torch.float64)
    return by_effect(model, CONFIG, shares, lessons, lambda some, name: some)


def test_layers_that_answers_need_more_get_more() -> None:
    model = Model([1e-4, 4e-4, 1e-6])
    found = shares_of(model)
    assert model.asked == 2, "a text without a question is no answer"
    first, second, third = found.mean(1).tolist()
    assert second > 1.2 and third < 0.8 and third < first < second
    assert found.mean() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(found[:, 0], found[:, 1])


def test_layers_of_equal_effect_keep_their_shares() -> None:
    torch.testing.assert_close(
        shares_of(Model([2e-4] * 4)), torch.ones(4, HEADS, dtype=torch.float64), atol=0.02, rtol=0
    )


def test_a_cut_is_measured_while_the_other_layers_are_cut() -> None:
    """The reference trial is not the whole cache."""
    trials = []
    model = Model([1e-4, 2e-4])
    model.lost = lambda text, answer, rows: (trials.append(rows), (torch.ones(3), None))[1]
    shares_of(model, [ASKED])
    counts = torch.tensor(trials[0]).float()[..., 0]
    reference = counts[-1]
    assert counts.shape == (3, 2) and (reference < 0.25 * LENGTH).all()
    for layer in range(2):
        assert counts[layer, layer] == pytest.approx(float(CUT * reference[layer]), abs=1)
        assert counts[layer, 1 - layer] == reference[1 - layer]


def test_many_layers_and_texts_without_questions_change_nothing() -> None:
    many = Model([1e-4] * FEW_LAYERS + [1e-2])
    assert (shares_of(many) == 1).all() and many.asked == 0
    silent = Model([1e-4, 1e-2])
    assert (shares_of(silent, [Lesson(ASKED.context, ASKED.later[1:])]) == 1).all()

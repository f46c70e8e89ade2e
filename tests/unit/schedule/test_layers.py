"""Budgets that fall with depth, beside a plain reading of PyramidKV's formula."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.schedule.layers import Pyramid, cut, padding
from vllm_kvevict.schedule.timeline import RequestTimeline, Timeline
from vllm_kvevict.settings.config import EvictionConfig

WINDOW, BLOCK = 32, 16


def by_layer(budget: int, length: int, layers: int, beta: int) -> list[Fraction]:
    """Tokens beside the window, from the shallowest layer on, as PyramidKV's code assigns them."""
    low = Fraction(budget, beta)
    high = 2 * budget - low
    if high > length:
        high = Fraction(length)
        low = 2 * budget - high
    if low > high:
        return [Fraction(budget)] * layers
    step = (high - low) / (layers - 1)
    return [high - layer * step for layer in range(layers)]


@given(
    budget=st.integers(1, 5000),
    length=st.integers(0, 9000),
    layers=st.integers(2, 70),
    beta=st.integers(1, 60),
    most=st.integers(2, 9),
)
def test_groups_keep_the_mean_of_their_layers(budget, length, layers, beta, most):
    expected = by_layer(budget, length, layers, beta)
    assert sum(expected) == layers * budget
    total = 0.0
    for group in cut(layers, most):
        mean = float(sum(expected[layer] for layer in group) / len(group))
        kept = Pyramid(group.start, group.stop, layers, beta).tokens(budget, length)
        assert kept == pytest.approx(mean, rel=1e-9, abs=1e-6)
        total += kept * len(group)
    assert total == pytest.approx(layers * budget)


def test_the_default_pyramid_of_a_model_with_32_layers():
    """A budget of 1024 with a window of 32: from 1934.4 down to 49.6 beside the window."""
    config = EvictionConfig(policy="pyramidkv", budget=1024)
    timelines = config.timelines(32, 32)
    groups = list(dict.fromkeys(timelines))
    assert [timelines.count(group) for group in groups] == [8, 8, 8, 8]
    step = (1934.4 - 49.6) / 31
    means = [1934.4 - step * (8 * index + 3.5) for index in range(4)]
    assert [group.budget(8000) for group in groups] == [int(mean) + 32 for mean in means]
    assert [group.store_blocks(8000) for group in groups] == [53, 38, 23, 8]
    assert sum(group.store_blocks(8000) for group in groups) == 4 * 31 - 2


@given(
    budget=st.one_of(st.integers(WINDOW + 1, 3000), st.integers(1, 100).map(lambda p: f"{p}%")),
    length=st.integers(1, 6000),
    layers=st.integers(2, 64),
    most=st.integers(2, 8),
    beta=st.floats(1, 50),
    allowed=st.booleans(),
)
def test_layers_together_hold_the_uniform_budget(budget, length, layers, most, beta, allowed):
    """To within one block per group, each as large as its layers; a store has at least one."""
    config = EvictionConfig(
        policy="snapkv" if allowed else "pyramidkv",
        allow="ada-pyramid" if allowed else "",
        budget=budget,
        groups=most,
        beta=beta,
    )
    timelines = config.timelines(BLOCK, layers)
    groups = list(dict.fromkeys(timelines))
    assert len(timelines) == layers and 2 <= len(groups) <= most
    mean = config.timeline(BLOCK).budget(length)
    blocks = sum(group.store_blocks(length) for group in timelines)
    uniform = Fraction(max(mean - WINDOW, 0), BLOCK) * layers
    assert abs(blocks - uniform) <= sum(timelines.count(group) for group in groups)
    stores = [group.store_blocks(length) for group in groups]
    assert stores == sorted(stores, reverse=True), "shallow layers hold no less than deep ones"
    if mean >= length:
        assert set(stores) == {config.timeline(BLOCK).store_blocks(length)}, "nothing to fall"


def test_the_shallowest_layers_are_not_given_more_than_there_is():
    rule = Timeline(BLOCK, WINDOW, 64, budget_tokens=WINDOW + 320)
    first, last = (replace(rule, pyramid=Pyramid(i, i + 1, 4, 20)) for i in (0, 3))
    assert (first.budget(2000), last.budget(2000)) == (WINDOW + 624, WINDOW + 16)
    assert (first.budget(432), last.budget(432)) == (432, WINDOW + 240)
    early, late = (RequestTimeline(rule, 432, 432) for rule in (first, last))
    assert (early.point, late.point) == (None, 432), "all of it fits the shallowest"
    assert early.due == 432 + 64, "which joins once it has outgrown its budget"


def test_unequal_places_are_unequal_rules():
    rule = Timeline(BLOCK, WINDOW, 64, budget_tokens=300)
    rules = {rule} | {replace(rule, pyramid=Pyramid(i, i + 2, 4, 20)) for i in (0, 2)}
    rules |= {replace(rule, pyramid=Pyramid(0, 2, 4, 10))}
    assert len(rules | set(rules)) == 4


@pytest.mark.parametrize(
    "bad", [dict(first=2, stop=2), dict(stop=5), dict(first=-1), dict(beta=0.5)]
)
def test_a_group_outside_the_layers(bad):
    with pytest.raises(ValueError, match="inside the layers"):
        Pyramid(**dict(first=0, stop=2, layers=4, beta=20) | bad)


@given(layers=st.integers(1, 130), most=st.integers(2, 12))
def test_groups_are_neighbours_and_nearly_even(layers, most):
    groups = cut(layers, most)
    assert [layer for group in groups for layer in group] == list(range(layers))
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert min(layers, 2) <= len(groups) <= min(layers, most)
    if layers % most == 0:
        assert sizes == [layers // most] * most


@pytest.mark.parametrize(
    "layers, sizes, unused",
    [
        (3, [1, 1, 1], 0), (4, [1] * 4, 0), (5, [2, 1, 1, 1], 0), (10, [5, 5], 0),
        (13, [7, 6], 1), (26, [7, 6, 7, 6], 2), (28, [7] * 4, 0), (61, [16, 15, 15, 15], 3),
    ],
)  # fmt: skip
def test_four_groups_or_fewer_where_padding_would_cost_more_than_a_tenth(layers, sizes, unused):
    assert [len(group) for group in cut(layers, 4)] == sizes
    assert padding(sizes) == unused

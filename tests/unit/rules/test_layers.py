"""Shares of layers, beside plain readings: PyramidKV's formula, all partitions, all splits."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.rules.layers import (
    Share,
    by_layer,
    group_layers,
    padding,
    pyramid,
    sizes_by_stage,
)
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.serving.profile import SHIPPED, read

WINDOW, BLOCK = 32, 16

SHARES = st.lists(st.floats(0.05, 4), min_size=2, max_size=12).map(
    lambda values: tuple(value * len(values) / sum(values) for value in values)
)


def pyramidkv(budget: int, length: int, layers: int, beta: int) -> list[Fraction]:
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
    budget=st.integers(20, 5000),
    more=st.integers(1, 9000),
    layers=st.integers(2, 70),
    beta=st.integers(1, 19),
    most=st.integers(2, 9),
)
def test_a_pyramid_is_pyramidkvs(budget, more, layers, beta, most):
    """To the token: blocks of one, and a deepest layer that keeps at least that."""
    length = budget + more
    expected = pyramidkv(budget, length, layers, beta)
    assert sum(expected) == layers * budget
    shares = pyramid(layers, beta)
    assert shares[0] == pytest.approx(2 - 1 / beta) and shares[-1] == pytest.approx(1 / beta)
    places = by_layer(shares, most, steepest=shares[0])
    kept = [share.blocks(budget, length, 1) for share in places]
    assert layers * budget - max(places[0].sizes) < sum(kept) <= layers * budget
    for share, tokens in zip(places, kept, strict=True):
        group = [layer for layer, other in enumerate(places) if other == share]
        assert abs(float(sum(expected[layer] for layer in group) / len(group)) - tokens) < 1.001


def test_the_default_pyramid_of_a_model_with_32_layers():
    """A budget of 1024 with a window of 32: from 1934.4 down to 49.6 beside the window."""
    config = EvictionConfig(policy="pyramidkv", budget=1024)
    rules = config.layer_rules(32, 32)
    groups = list(dict.fromkeys(rules))
    assert [rules.count(group) for group in groups] == [8, 8, 8, 8]
    # 53.8, 38.6, 23.4 and 8.2 blocks: the two largest remainders are rounded up.
    assert [group.store_blocks(8000) for group in groups] == [54, 39, 23, 8]
    assert sum(group.store_blocks(8000) for group in groups) == 4 * 31


@given(
    shares=SHARES,
    most=st.integers(2, 6),
    budget=st.floats(0, 400),
    length=st.integers(0, 500),
    block=st.sampled_from([1, 8, 16]),
)
def test_layers_together_keep_the_mean(shares, most, budget, length, block):
    places = by_layer(shares, most)
    kept = [share.blocks(budget, length, block) for share in places]
    if budget >= length:
        assert set(kept) == {max(1, int(budget // block))}, "nothing is evicted"
        return
    pages = length // block
    total = budget / block * len(shares)
    assert all(1 <= blocks <= max(1, pages) for blocks in kept)
    assert sum(kept) <= max(total, len(shares)) + 1e-6, "never more than the budget"
    bounded = all(blocks == max(1, pages) for blocks in kept)
    assert sum(kept) > total - max(places[0].sizes) or bounded, "and less by a group at most"
    order = sorted(places, key=lambda share: (share.value, -share.group))
    stores = [share.blocks(budget, length, block) for share in order]
    assert stores == sorted(stores), "the larger share never keeps less"


@given(
    shares=st.lists(st.floats(0.05, 4), min_size=2, max_size=4),
    total=st.integers(4, 24),
    pages=st.integers(3, 9),
)
def test_no_split_in_whole_blocks_is_nearer_to_the_shares(shares, total, pages):
    """Where no group meets a bound: Hamilton's apportionment has the least squared distance."""
    count = len(shares)
    mean = sum(shares) / count
    shares = tuple(share / mean for share in shares)
    wanted = [share * total / count for share in shares]
    if not all(1 <= blocks <= pages for blocks in wanted) or total >= pages * count:
        return
    places = [Share(group, (1,) * count, shares) for group in range(count)]
    kept = [share.blocks(total / count, pages, 1) for share in places]

    def distance(split):
        return sum((a - b) ** 2 for a, b in zip(split, wanted, strict=True))

    splits = (s for s in product(range(1, pages + 1), repeat=count) if sum(s) == total)
    assert sum(kept) == total
    assert distance(kept) == pytest.approx(min(map(distance, splits)))


def test_what_a_small_share_is_given_is_taken_from_the_others():
    """Three blocks a layer on average; the shares alone would give 0.3, 2.7 and 6."""
    places = [Share(group, (2, 2, 2), (0.1, 0.9, 2.0)) for group in range(3)]
    assert [share.blocks(3 * BLOCK, 100 * BLOCK, BLOCK) for share in places] == [1, 2, 6]
    # Room for five blocks: what the largest cannot use goes to the others.
    assert [share.blocks(3 * BLOCK, 5 * BLOCK, BLOCK) for share in places] == [1, 3, 5]
    # Less than a block a layer: a block each all the same.
    assert [share.blocks(0.9 * BLOCK, 100 * BLOCK, BLOCK) for share in places] == [1, 1, 1]


@given(
    shares=SHARES,
    percent=st.integers(1, 99),
    length=st.integers(1000, 20_000),
    measured_at=st.sampled_from([0.0625, 0.125, 0.5]),
)
def test_shares_move_towards_1_where_a_share_keeps_more(shares, percent, length, measured_at):
    """At the measured part they hold; above it each layer keeps a power of what it kept there."""
    count = len(shares)
    places = [Share(i, (1,) * count, shares, measured_at=measured_at) for i in range(count)]
    budget, kept = percent / 100 * length, percent / 100
    found = [place.blocks(budget, length, 1, constant=True) for place in places]
    assert sum(found) == pytest.approx(min(1, kept) * length * count, abs=count)
    parts = np.array(shares) * measured_at
    if kept > measured_at:
        parts = np.minimum(parts, 1) ** (np.log(kept) / np.log(measured_at))
    # All parts grow by one factor until the mean is right; nobody keeps more than all.
    low, high = 0.0, 1e6
    for _ in range(200):
        factor = (low + high) / 2
        low, high = (low, factor) if np.minimum(parts * factor, 1).mean() > kept else (factor, high)
    assert found == pytest.approx(np.minimum(parts * low, 1) * length, abs=count + 1)
    linear = [place.blocks(budget, length, 1) for place in places]
    if kept > measured_at and min(shares) < 0.5:
        assert min(found) >= min(linear) - 1, "the least layer keeps no less"


def test_a_budget_in_tokens_keeps_the_measured_shares():
    """It is a share that falls with the length: a group must not keep more of a shorter text."""
    share = Share(1, (1, 1), (1.9, 0.1), measured_at=0.125)
    rule = EvictionRule(BLOCK, WINDOW, 64, budget_tokens=WINDOW + 40 * BLOCK, share=share)
    assert rule.store_blocks(2000) == rule.store_blocks(20_000) == 4
    shared = replace(rule, budget_tokens=None, budget_share=0.5)
    # 0.1 / 8 of the tokens at an eighth; the cube root of that at a half, and 1.9 / 8 likewise.
    parts = [(part / 8) ** (1 / 3) for part in (1.9, 0.1)]
    wanted = (10_000 - WINDOW) / BLOCK * 2 * parts[1] / sum(parts)
    assert shared.store_blocks(20_000) == pytest.approx(wanted, abs=2)
    assert replace(shared, budget_share=0.125).store_blocks(20_000) == 15


@example(budget="43%", length=126, layers=3, most=2, beta=1.0, allowed=False)
@given(
    budget=st.one_of(st.integers(WINDOW + 1, 3000), st.integers(1, 100).map(lambda p: f"{p}%")),
    length=st.integers(1, 6000),
    layers=st.integers(2, 64),
    most=st.integers(2, 8),
    beta=st.floats(1, 50),
    allowed=st.booleans(),
)
def test_layers_together_hold_the_uniform_budget(budget, length, layers, most, beta, allowed):
    """To within a block of the largest group; a store has at least one."""
    config = EvictionConfig(
        policy="snapkv" if allowed else "pyramidkv",
        allow="ada-pyramid" if allowed else "",
        budget=budget,
        options=dict(groups=most, beta=beta),
    )
    rules = config.layer_rules(BLOCK, layers)
    groups = list(dict.fromkeys(rules))
    assert len(rules) == layers and 2 <= len(groups) <= most
    mean = config.rule(BLOCK).budget(length)
    blocks = sum(group.store_blocks(length) for group in rules)
    uniform = Fraction(max(mean - WINDOW, 0), BLOCK) * layers
    assert abs(blocks - uniform) <= layers
    stores = [group.store_blocks(length) for group in groups]
    assert stores == sorted(stores, reverse=True), "shallow layers hold no less than deep ones"
    if mean >= length:
        assert set(stores) == {config.rule(BLOCK).store_blocks(length)}, "nothing to fall"


def test_the_shallowest_layers_are_not_given_more_than_there_is():
    rule = EvictionRule(BLOCK, WINDOW, 64, budget_tokens=WINDOW + 320)
    places = by_layer(pyramid(4, 20), 4, steepest=1.95)
    first, last = (replace(rule, share=places[index]) for index in (0, 3))
    assert (first.store_blocks(2000), last.store_blocks(2000)) == (39, 1)
    assert (first.store_blocks(432), last.store_blocks(432)) == (400 // BLOCK, 240 // BLOCK)
    early, late = (EvictionProgress(rule, 432, 432) for rule in (first, last))
    assert (early.next_prefill_eviction, late.next_prefill_eviction) == (None, 432), (
        "all of it fits the shallowest"
    )
    assert early.next_eviction == 432 + 64, "which joins once it has outgrown its budget"


def test_groups_of_one_share_are_different_rules():
    rule = EvictionRule(BLOCK, WINDOW, 64, budget_tokens=300)
    rules = {replace(rule, share=share) for share in by_layer((1.0,) * 4, 2)}
    assert len(rules) == 2
    assert len(rules | {rule} | {replace(rule, share=Share(0, (2, 2), (1.5, 0.5)))}) == 4


@pytest.mark.parametrize("bad", [dict(group=2), dict(sizes=(1,)), dict(shares=(2.0, 0.0))])
def test_a_share_of_no_group(bad):
    with pytest.raises(ValueError, match="measured_at must be between 0 and 1"):
        Share(group=0, sizes=(1, 1), shares=(1.5, 0.5), measured_at=1.0)
    with pytest.raises(ValueError, match="one of the groups"):
        Share(**dict(group=0, sizes=(1, 1), shares=(1.5, 0.5)) | bad)
    with pytest.raises(ValueError, match="at least 1"):
        pyramid(4, 0.5)


def partitions(layers: tuple[int, ...], sizes: list[int]):
    if not sizes:
        yield []
        return
    for group in combinations(layers, sizes[0]):
        rest = tuple(layer for layer in layers if layer not in group)
        for others in partitions(rest, sizes[1:]):
            yield [group, *others]


@given(
    shares=st.lists(st.floats(0.1, 4).map(lambda share: round(share, 1)), min_size=2, max_size=7),
    most=st.integers(2, 4),
)
def test_no_partition_into_even_groups_loses_less(shares, most):
    def loss(groups):
        means = [sum(shares[layer] for layer in group) / len(group) for group in groups]
        return sum(
            (shares[layer] - mean) ** 2
            for group, mean in zip(groups, means, strict=True)
            for layer in group
        )

    groups = group_layers(shares, most)
    assert sorted(layer for group in groups for layer in group) == list(range(len(shares)))
    every = partitions(tuple(range(len(shares))), sorted(map(len, groups)))
    assert loss(groups) == pytest.approx(min(map(loss, every)), abs=1e-6)


def test_groups_need_not_be_neighbours():
    assert group_layers((0.4, 1.5, 0.5, 1.6), 2) == [(1, 3), (0, 2)]
    places = by_layer((0.4, 1.5, 0.5, 1.6), 2)
    assert [share.group for share in places] == [1, 0, 1, 0]
    assert places[0].shares == pytest.approx((1.55, 0.45))


@given(layers=st.integers(1, 130), most=st.integers(2, 12), beta=st.floats(1.5, 40))
def test_groups_of_a_pyramid_are_neighbours_and_nearly_even(layers, most, beta):
    groups = group_layers(pyramid(layers, beta), most)
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
        (13, [7, 6], 1), (26, [7, 7, 6, 6], 2), (28, [7] * 4, 0), (61, [16, 15, 15, 15], 3),
    ],
)  # fmt: skip
def test_four_groups_or_fewer_where_padding_would_cost_more_than_a_tenth(layers, sizes, unused):
    assert [len(group) for group in group_layers(pyramid(layers, 20.0), 4)] == sizes
    assert padding(sizes) == unused


@pytest.mark.parametrize("near", [0.9999999999999999, 1.0000000000000002])
def test_shares_that_differ_by_rounding_are_equal(near):
    groups = by_layer((1.0,) * 4, None)
    assert by_layer((near, 1.0, 1.0, 1.0), None)[0].sizes == groups[0].sizes == (2, 2)


def test_the_shipped_shares_ask_for_six_groups():
    """The layers that look a fact up, 17 and 21, then have no group with layers of share 1."""
    (path,) = SHIPPED.glob("*.json")
    places = by_layer(read(path).layers, None)
    assert places[0].sizes == (5,) * 6
    assert min(places[layer].value for layer in (17, 21)) > 1.5


@example(shares=(0.9999999999999999, 1.0, 1.0, 1.0))
@given(shares=SHARES)
def test_without_a_number_the_fewest_groups_that_come_near(shares):
    """Those of up to 8 which leave a 25th of the variance inside groups, or lose least.

    Lost is the variance inside groups and the memory that padding leaves unused.
    """

    def left(most):
        inside = [
            np.var([shares[layer] for layer in g]) * len(g) for g in group_layers(shares, most)
        ]
        return sum(inside) / max(np.var(shares) * len(shares), 1e-12)

    groups = len(by_layer(shares, None)[0].sizes)
    near = [most for most in range(2, 9) if left(most) <= 1 / 25]
    if near:
        assert groups == len(group_layers(shares, near[0]))
    else:

        def lost(most):
            missing = padding([len(group) for group in group_layers(shares, most)])
            return left(most) + missing / (len(shares) + missing)

        assert lost(groups) == pytest.approx(min(map(lost, range(2, 9))))


@given(shares=SHARES, stages=st.integers(1, 4), most=st.integers(2, 8))
def test_every_stage_has_layers_of_every_group(shares, stages, most):
    """As many of each as the others have, or one more: a block of a group is one in each stage."""
    shares = tuple(shares) * 4
    size = len(shares) // stages
    sizes = (size,) * (stages - 1) + (len(shares) - size * (stages - 1),)
    groups = group_layers(shares, most, sizes)
    assert sorted(layer for group in groups for layer in group) == list(range(len(shares)))
    ends = np.cumsum(sizes)
    for start, end in zip(ends - sizes, ends, strict=True):
        inside = [sum(start <= layer < end for layer in group) for group in groups]
        assert max(inside) - min(inside) <= 1 and min(inside) >= 1
    means = [np.mean([shares[layer] for layer in group]) for group in groups]
    assert all(one >= next_ - 1e-9 for one, next_ in pairwise(means))


def test_shares_count_within_their_stage():
    """A stage's memory serves its own layers: what its neighbour does not need is no use to it."""
    shares = (3.0, 1.0, 0.2, 0.6)
    places = by_layer(shares, 2, None, (2, 2))
    assert [share.value for share in places] == pytest.approx([1.5, 0.5, 0.5, 1.5])
    assert places[0].sizes == (2, 2)
    falling = pyramid(4, 20.0)
    places = by_layer(falling, 4, falling[0], (2, 2))
    assert [share.group for share in places] == [0, 1, 0, 1]
    steepest = falling[2] / ((falling[2] + falling[3]) / 2)
    assert places[0].steepest == pytest.approx(steepest)
    assert by_layer(shares, 2, None, (4,)) == by_layer(shares, 2)


def test_padding_of_stages():
    """Each stage has memory for its largest group, as often as there are groups."""
    assert padding([2, 1], [1, 2]) == 2
    assert padding([2, 2], [3, 3]) == 0
    assert sizes_by_stage([(0, 3, 4), (1, 2)], (3, 2)) == [[1, 2], [2, 0]]

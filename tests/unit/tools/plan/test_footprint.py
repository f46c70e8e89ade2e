"""Blocks of one request, counted by hand and against the rule's own bound."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rules.peak import peak_blocks
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule
from vllm_kvevict.tools.plan.footprint import EvictingGroup, Group, SharingGroup, request_footprint

RULE = EvictionRule(block_size=32, window=32, interval=128, budget_tokens=256)


def test_by_hand():
    """2048 tokens at a budget of 256: S = 7, T = 2016, so 1 tail block; again at 2176."""
    one = request_footprint([EvictingGroup(RULE, 2048)], 2048, 192)
    assert one.prompt == 64 + 7 + 1
    assert one.decode == 7 + 5  # at 2176: store, and [2016, 2176)
    assert one.replace == 7 + 1
    assert one.evictions == 2
    # Steps 2049..2176 hold 2, 3, 4, 5 tail blocks for 32 steps each; then T = 2144, and
    # 2177..2208 hold 2, 2209..2239 hold 3.
    tail = 32 * (2 + 3 + 4 + 5) + 32 * 2 + 31 * 3
    assert one.mean == pytest.approx(7 + tail / 191)


def test_by_hand_with_four_tokens_in_the_room_of_one():
    """224 tokens beside the window fill one block of 4 * 32: S = 1, T and tails as above."""
    rule = replace(RULE, page_tokens=128)
    one = request_footprint([EvictingGroup(rule, 2048)], 2048, 192)
    assert (one.prompt, one.decode, one.replace, one.evictions) == (64 + 1 + 1, 1 + 5, 1 + 1, 2)
    tail = 32 * (2 + 3 + 4 + 5) + 32 * 2 + 31 * 3
    assert one.mean == pytest.approx(1 + tail / 191)


@pytest.mark.parametrize("evicts_shared", [False, True])
def test_a_shared_context_by_hand(evicts_shared):
    """2040 tokens: S = 7, T = 1984, one full block behind it; 40 tokens and 192 are its own.

    The next eviction is due at 2168: it would give back the blocks from 2016 to 2112, which are
    three, and take 7. After 2271 tokens there are no more than seven of them.
    """
    group = SharingGroup(RULE, 2080, 2040, evicts_shared)
    one = request_footprint([group], 2080, 192)
    assert group.shared == 7 + 1
    assert one.prompt == 2  # [2016, 2080)
    if evicts_shared:
        # At 2168 it has [2016, 2168); then a store and [2112, 2271) of its own.
        assert (one.decode, one.replace, one.evictions) == (7 + 5, 7 + 1, 1)
    else:
        assert (one.decode, one.replace, one.evictions) == (8, 0, 0)


def test_stock_holds_every_token():
    one = request_footprint([Group(32)], 2048, 192)
    assert (one.prompt, one.decode, one.replace, one.evictions) == (64, 70, 0, 0)
    assert one.sequences(140) == 2 and one.sequences(139) == 1 and one.sequences(69) == 0


def test_a_sliding_window_is_bounded():
    one = request_footprint([Group(32, cap=4), Group(32)], 2048, 192)
    assert one.prompt == 4 + 64 and one.decode == 4 + 70


def test_a_prompt_below_its_budget_is_never_evicted():
    assert request_footprint([EvictingGroup(RULE, 100)], 100, 50) == request_footprint(
        [Group(32)], 100, 50
    )


def test_an_answer_of_one_token():
    one = request_footprint([EvictingGroup(RULE, 2048)], 2048, 1)
    assert one.evictions == 0 and one.prompt == one.decode == 64


def test_sequences_are_what_fits():
    one = request_footprint([EvictingGroup(RULE, 2048)], 2048, 192)
    assert one.sequences(71) == 0
    assert one.sequences(72) == 1 and one.sequences(83) == 1 and one.sequences(84) == 2


@given(
    budget=st.one_of(st.integers(9, 300), st.sampled_from(["10%", "50%", "90%"])),
    window=st.integers(1, 8),
    interval=st.integers(0, 40),
    prompt=st.integers(1, 400),
    output=st.integers(1, 300),
)
def test_within_what_the_rule_bounds(budget, window, interval, prompt, output):
    share = float(budget[:-1]) / 100 if isinstance(budget, str) else None
    rule = EvictionRule(8, window, interval, None if share else budget, share)
    one = request_footprint([EvictingGroup(rule, prompt)], prompt, output)
    bound = peak_blocks(EvictionProgress(rule, prompt, prompt), prompt + output)
    assert max(one.prompt, one.decode, one.replace) <= bound + 1
    # Where stores grow, the largest moment and the largest eviction are not the same.
    assert share is not None or one.decode + one.replace <= bound + 1
    assert 0 < one.mean <= one.decode

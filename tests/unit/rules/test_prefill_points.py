"""Evictions inside a prompt, against a walk that holds blocks token by token."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rules.test_rule import PROFILE, Walk, rules
from vllm_kvevict.rules.layers import by_layer
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule, blocks_for


@st.composite
def streaming(draw) -> EvictionRule:
    rule = draw(rules(share=False))
    return replace(rule, prefill_interval=draw(st.sampled_from([1, 7, 32, 100, 300])))


class Streaming(Walk):
    """A prompt whose survivors stay in its own blocks: none of another is held, ever."""

    def prefill(self, chunk: int) -> None:
        while self.n < self.prefill_end:
            stop = self.request.next_prefill_eviction
            stop = stop if stop is not None and self.n < stop else self.prefill_end
            self.step(min(chunk, stop - self.n))

    def step(self, tokens: int) -> None:
        bs = self.rule.block_size
        self.positional |= {p // bs for p in range(self.n, self.n + tokens)}
        self.n += tokens
        self.held = max(self.held, len(self.positional) + self.stores)
        if self.request.is_due(self.n):
            old, new = self.request.evict(self.n)
            before = len(self.positional) + self.stores
            self.positional -= {b for b in self.positional if old <= b * bs < new}
            self.stores = self.request.store_blocks
            assert len(self.positional) + self.stores < before, "nothing was given back"
            self.evicted_at.append(self.n)


def expected_points(rule: EvictionRule, end: int, at: int | None) -> list[int]:
    """Where prefill evicts: the budget full, then every interval, and at the end of the context.

    An interval fills a page of the store. Blocks are counted here as if stored tokens took as much
    room as others.
    """
    bs, window = rule.block_size, rule.window
    size = rule.page_tokens // bs
    kept = max(1, (rule.budget_tokens - window) // rule.page_tokens) * size
    stride = -(-max(rule.prefill_interval, rule.page_tokens) // bs) * bs
    goal = end if at is None else at
    n, found, tail, store = (kept + -(-window // bs)) * bs + stride, [], 0, 0
    candidates = {goal, *range(n, end, stride)}
    for point in sorted(candidates):
        covered = max(0, (point - window) // bs)
        if covered - tail + store > kept:
            found.append(point)
            tail, store = covered, kept
    return found


@PROFILE
@given(
    streaming(),
    st.integers(1, 900),
    st.integers(0, 60),
    st.integers(1, 300),
    st.none() | st.floats(0.01, 1),
)
def test_points_depend_on_lengths_alone(rule, prompt_len, replayed, chunk, share):
    end = prompt_len + replayed
    at = None if share is None else max(1, round(share * prompt_len))
    walk = Streaming(rule, prompt_len, end, 0, at)
    first, cap = walk.request.next_eviction, walk.request.hit_cap
    walk.prefill(chunk)
    expected = expected_points(rule, end, at)
    # Behind a point of the request's own an interval of decode may end with the prefill.
    found = walk.evicted_at if at is None else [n for n in walk.evicted_at if n < end or n == at]
    assert found == expected
    if walk.evicted_at and expected:
        assert first == walk.evicted_at[0] and cap == rule.tail_start(first)
        assert walk.request.computed_valid == first
    fresh = EvictionProgress(rule, prompt_len, end, at)
    assert fresh.points == tuple(n for n in walk.evicted_at if n < end)


@pytest.mark.slow
@PROFILE
@given(streaming(), st.integers(1, 900), st.integers(0, 60), st.integers(1, 300))
def test_a_prompt_holds_its_budget_and_one_interval(rule, prompt_len, replayed, chunk):
    bs = rule.block_size
    walk = Streaming(rule, prompt_len, prompt_len + replayed, 0)
    request = EvictionProgress(rule, prompt_len, walk.prefill_end)
    walk.prefill(chunk)
    assert walk.held == request.sufficient_blocks(walk.n)
    store = rule.store_blocks(prompt_len) * rule.page_tokens // bs
    assert walk.held <= store + blocks_for(rule.window, bs) + rule.prefill_stride // bs + 1
    for _ in range(3 * rule.stride + 2 * bs):
        walk.step(1)
        assert walk.held <= request.sufficient_blocks(walk.n)


@PROFILE
@given(
    streaming(),
    st.sampled_from([(1.0, 1.0), (1.9, 0.1), (2.1, 0.6, 0.3), (1.3, 1.2, 0.5)]),
    st.integers(1, 900),
    st.integers(1, 200),
    st.integers(0, 400),
    st.none() | st.floats(0.01, 1),
)
def test_one_request_never_needs_more_than_start_up_asks_for(
    rule, shares, prompt_len, chunk, answer, share
):
    at = None if share is None else max(1, round(share * prompt_len))
    for one in by_layer(shares, len(shares)):
        mine = replace(rule, share=one)
        walk = Streaming(mine, prompt_len, prompt_len, 0, at)
        walk.prefill(chunk)
        for _ in range(answer):
            walk.step(1)
        bound = mine.max_blocks(prompt_len + answer)
        assert walk.held <= bound <= blocks_for(walk.n, rule.block_size)


def test_groups_stop_at_the_same_places():
    """What keeps more begins later, at a point of the others."""
    rule = EvictionRule(16, 32, 128, budget_tokens=352, prefill_interval=160)
    alike = EvictionProgress(rule, 2000, 2000).points
    assert alike == tuple(range(352 + 160, 2000, 160))
    most, least = (
        EvictionProgress(replace(rule, share=share), 2000, 2000).points
        for share in by_layer((1.7, 0.3), 2)
    )
    assert least == alike and most == alike[1:]


def test_an_eviction_that_is_put_off_runs_at_the_next_point():
    request = EvictionProgress(EvictionRule(16, 32, 128, 352, prefill_interval=160), 2000, 2000)
    request.defer(490)  # A step of its window.
    assert (request.next_prefill_eviction, request.next_eviction) == (672, 672)
    request.evict(672)
    assert request.tail_start == 640 and request.next_eviction == 832


def test_without_evictions_in_decode_an_answer_may_be_everything():
    rule = EvictionRule(16, 32, 0, 352, prefill_interval=160)
    assert rule.max_blocks(4000) == 250
    assert replace(rule, interval=64).max_blocks(4000) == 20 + 12 + 2
    assert replace(rule, interval=64, prefill_interval=0).max_blocks(4000) == 250
    assert EvictionProgress(rule, 3900, 3900).sufficient_blocks(4000) == 20 + 2 + 10


def test_a_share_is_refused():
    with pytest.raises(ValueError, match="budget in tokens"):
        EvictionRule(16, 32, 0, budget_share=0.5, prefill_interval=160)


def test_an_eviction_put_off_at_a_grid_point_stops_at_the_requests_own():
    rule = EvictionRule(
        block_size=8, window=8, interval=0, budget_tokens=40, budget_share=None, prefill_interval=64
    )
    request = EvictionProgress(rule, prompt_len=300, prefill_end=300, requested_point=150)
    first = rule.next_point(0)
    assert (
        request.next_chunk_end(0) == request.next_eviction == first < 150 < rule.next_point(first)
    )
    assert [request.next_chunk_end(first), request.next_chunk_end(149)] == [150, 150], (
        "not run: it waits"
    )
    assert request.next_chunk_end(150) == rule.next_point(150) > 150
    request.evict(150)
    assert request.next_chunk_end(150) == request.next_eviction == rule.next_point(150)

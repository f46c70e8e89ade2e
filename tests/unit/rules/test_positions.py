"""Evictions every so many tokens are the same for every prompt and replay of the same tokens."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rules.replay import sufficient_blocks
from tests.unit.rules.test_rule import PROFILE
from vllm_kvevict.ops.torch.allocate import shared_pages
from vllm_kvevict.rules.ceiling import max_blocks_ever
from vllm_kvevict.rules.layers import by_layer
from vllm_kvevict.rules.positions import MAX_RULES, FixedPositions, fixed_positions
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule, blocks_for

SHARES = [None, (1.0, 1.0), (1.9, 0.1), (2.1, 0.6, 0.3)]


@st.composite
def rules(draw) -> EvictionRule:
    window = draw(st.sampled_from([1, 8, 32]))
    budget = draw(
        st.sampled_from([dict(budget_tokens=window + 1), dict(budget_tokens=200)])
        | st.sampled_from([dict(budget_share=0.1), dict(budget_share=0.5, min_tokens=90)])
    )
    block_size = draw(st.sampled_from([1, 8, 16]))
    rule = EvictionRule(
        block_size, window, 64, every=draw(st.integers(max(window, 16), 150)),
        protect_first=draw(st.sampled_from([0, 0, 5, 70])),
        page_tokens=block_size * draw(st.sampled_from([4, 4, 8, 15])) // 4, **budget,
    )  # fmt: skip
    if shares := draw(st.sampled_from(SHARES)):
        rule = replace(rule, share=draw(st.sampled_from(by_layer(shares, len(shares)))))
    return rule


def walk(request: EvictionProgress, end: int) -> list[tuple[int, int, int]]:
    """Length, tail start and blocks of every eviction before ``end``."""
    found = []
    while request.next_eviction is not None and request.next_eviction < end:
        n = request.next_eviction
        request.evict(n)
        found.append((n, request.tail_start, request.store_blocks))
    return found


@PROFILE
@given(rules(), st.lists(st.integers(1, 1500), min_size=2, max_size=4), st.integers(0, 200))
def test_what_is_kept_depends_on_the_tokens_so_far_alone(rule, prompts, more):
    walks = [
        walk(EvictionProgress(rule, prompt, min(1990, prompt + more), max_length=2000), 1500)
        for prompt in prompts
    ]
    assert all(one == walks[0] for one in walks)
    assert all((n - rule.next_point(0)) % rule.prefill_stride == 0 for n, _, _ in walks[0])
    kept = [store for _, _, store in walks[0]]
    assert kept == sorted(kept), "a store never shrinks"
    for n, _, store in walks[0]:
        assert store >= rule.store_blocks(n) or rule.may_keep_all
    if rule.share is None and rule.budget_share is None:
        lengths = [n for n, _, _ in walks[0]]
        assert lengths == list(range(rule.next_point(0), 1500, rule.prefill_stride))


@PROFILE
@given(rules(), st.integers(1, 900), st.integers(1, 500))
def test_a_progress_that_continues_is_the_one_that_began(rule, prompt, more):
    """A turn that starts with a store goes on as one that has evicted everything itself."""
    first = EvictionProgress(rule, prompt, prompt, max_length=3000)
    walk(first, prompt + 1)
    turn = first.replayed(prompt + more)
    fresh = EvictionProgress(rule, prompt + more, prompt + more, max_length=3000)
    walk(fresh, prompt + 1)
    assert (turn.next_eviction, turn.next_prefill_eviction) == (
        fresh.next_eviction,
        fresh.next_prefill_eviction,
    )
    assert walk(turn, 2500) == walk(fresh, 2500)


@PROFILE
@given(rules(), st.integers(1, 700), st.integers(1, 300))
def test_no_request_holds_more_than_it_is_promised(rule, prompt, answer):
    ends = prompt + answer
    request = EvictionProgress(rule, prompt, prompt, max_length=ends)
    most, bs = max_blocks_ever(rule, prompt, ends), rule.block_size
    held = tail = store = 0
    for n, after, kept in walk(request, ends):
        held = max(held, blocks_for(n, bs) - tail // bs + store + 1)
        tail, store = after, kept
    held = max(held, blocks_for(ends - 1, bs) - tail // bs + store)
    if rule.bounds_prompts:
        assert min(held, blocks_for(ends, bs)) <= most
        assert most <= rule.max_blocks(ends)
    else:
        assert most == rule.max_blocks(ends) == blocks_for(ends, bs)


@PROFILE
@given(rules().filter(lambda rule: rule.budget_tokens is not None), st.integers(1, 900))
def test_as_many_blocks_as_a_replay_of_every_eviction_needs(rule, prompt):
    request = EvictionProgress(rule, prompt, prompt + 20)
    for n in (prompt, prompt + 20, prompt + 300):
        assert request.sufficient_blocks(n) == sufficient_blocks(request, n)


@PROFILE
@given(
    st.lists(rules(), min_size=1, max_size=2), st.lists(st.integers(1, 900), min_size=1, max_size=2)
)
def test_positions_are_those_of_a_replay_of_every_eviction(several, lengths):
    """However the lengths are asked for, each is what one request after the other would do."""
    positions, groups = FixedPositions(dict(enumerate(several))), range(len(several))
    for n in lengths:
        replays = [EvictionProgress(rule, n, n) for rule in several]
        walks = [walk(request, n + 1) for request in replays]
        found = [one for one in positions.up_to(n) if one.point <= n]
        assert [one.point for one in found] == sorted({e for each in walks for e, _, _ in each})
        for one in found:
            so_far = [[(0, 0, 0)] + [e for e in each if e[0] <= one.point] for each in walks]
            assert one.tails == tuple((g, so_far[g][-1][1]) for g in groups)
            assert one.stores == tuple((g, so_far[g][-1][2]) for g in groups)
            assert one.share == max(replay.share(one.point) for replay in replays)
        for group, rule in enumerate(several):
            need = sufficient_blocks(EvictionProgress(rule, n, n), n)
            assert positions.sufficient_blocks(group, n) == need


@PROFILE
@given(rules(), st.integers(1, 900), st.integers(1, 500), st.integers(1, 400))
def test_a_progress_after_a_position_is_one_that_evicted_there(rule, prompt, more, answer):
    fresh, end = EvictionProgress(rule, prompt, prompt + more, max_length=1500), prompt + answer
    start = EvictionProgress(rule, prompt, prompt, max_length=1500)
    walk(fresh, end + 1)
    after = FixedPositions({0: rule}).progress_after(0, end, start, prompt + more)
    assert after == fresh
    assert walk(after, 1500) == walk(fresh, 1500)


@pytest.mark.parametrize("page_tokens", [32, 60, 120])
@pytest.mark.parametrize(("often", "prompt"), [("every", 4000), ("interval", 20)])
def test_heads_get_their_shares_of_a_conversation(page_tokens, often, prompt):
    """Also where a page of the store holds more tokens than are asked for between two evictions."""
    rule = EvictionRule(
        32, 32, budget_share=0.1, min_tokens=128, recent=8, page_tokens=page_tokens,
        **{"interval": 0} | {often: 32},
    )  # fmt: skip
    shares, pages, last = torch.tensor([[1.8, 0.9, 0.3]]), torch.zeros(1, 3, dtype=torch.int64), 0
    evictions = walk(EvictionProgress(rule, prompt, prompt), 4000)
    for _, tail_start, store in evictions:
        candidates = pages * page_tokens + tail_start - last
        pages, last = shared_pages(shares, candidates // page_tokens, store), tail_start
        assert pages.sum() == 3 * store
    assert len(evictions) > 20 and store >= 10
    assert ((pages / store - shares).abs() <= 1 / store).all()


def test_a_request_with_rules_of_its_own_pays_for_its_own_tokens(monkeypatch):
    """Clients who give every request another budget, number and protected tokens."""
    asked, gain = 0, EvictionProgress.gain

    def counted(self, *args):
        nonlocal asked
        asked += 1
        return gain(self, *args)

    monkeypatch.setattr(EvictionProgress, "gain", counted)
    groups = 8
    for number in range(3 * MAX_RULES):
        rule = EvictionRule(
            16, 32, 128, every=128 + 16 * (number % 5), protect_first=number,
            budget_tokens=256 + number,
        )  # fmt: skip
        rules = {group: replace(rule, budget_tokens=256 + group) for group in range(groups)}
        of_request = fixed_positions(rules)
        for n in (0, 300, 2000, 9000):
            asked = 0
            of_request.up_to(n)
            of_request.sufficient_blocks(0, n)
            assert asked <= 2 * groups * (n // rule.prefill_stride), "twice in each interval"
        assert asked > groups, "none of them had been asked for"
        asked, now = 0, EvictionProgress(rules[0], 9000, 9000, max_length=9100)
        of_request.progress_after(0, 8000, now, 9000)
        assert not asked


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.999999, 1.0])
@pytest.mark.parametrize("page_tokens", [16, 60])
def test_a_tiny_request_does_not_walk_through_all_that_it_may_become(
    monkeypatch: pytest.MonkeyPatch, share: float, page_tokens: int
) -> None:
    """Two tokens, and a budget that keeps all for long: 158 ms of the engine at 131,072 tokens."""
    asked, gain = 0, EvictionProgress.gain

    def counted(self, *args):
        nonlocal asked
        asked += 1
        return gain(self, *args)

    monkeypatch.setattr(EvictionProgress, "gain", counted)
    shares, found = by_layer((1.9, 1.2, 0.6, 0.3), 4), set()
    for group in range(4):
        dues = []
        for longest in (300, 131_072, 1 << 20, None):
            rule = EvictionRule(
                16, 32, 128, every=128, budget_share=share, page_tokens=page_tokens,
                share=shares[group], protect_first=2,
            )  # fmt: skip
            asked = 0
            request = EvictionProgress(rule, 2, 2, max_length=longest)
            assert asked <= 2 * 17, "the searched range doubles with every second one"
            dues.append(request.next_eviction)
            if request.next_eviction is not None:
                assert request.scheduled_gain(request.next_eviction) > 0
        # The maximum length decides whether it is reached, not where it is.
        known = [due for due in dues if due is not None]
        assert len(set(known)) <= 1
        found |= set(known)
    assert found or share == 1.0

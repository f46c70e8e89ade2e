"""A request that goes on under a smaller budget: what its next evictions keep and give back."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.schedule.request_timeline import RequestTimeline
from vllm_kvevict.schedule.timeline import Timeline, blocks_for

PROFILE = settings(deadline=None, derandomize=True)
SHARES = st.lists(st.floats(0.02, 0.9), min_size=2, max_size=4, unique=True)


@PROFILE
@given(
    shares=SHARES,
    size=st.sampled_from([1, 4, 16]),
    window=st.integers(1, 40),
    interval=st.sampled_from([0, 7, 32]),
    prompt=st.integers(50, 900),
    waits=st.lists(st.integers(0, 60), min_size=4, max_size=4),
    whole=st.booleans(),
)
def test_it_holds_what_a_smaller_budget_keeps(shares, size, window, interval, prompt, waits, whole):
    rules = [Timeline(size, window, interval, budget_share=s) for s in sorted(shares)[::-1]]
    one = RequestTimeline(rules[0], prompt, prompt, on_demand=whole)
    held = blocks_for(prompt, size)
    n = prompt
    if not whole and one.is_due(n):
        held -= one.gain(n)
        one.evict(n)
    for rule, wait in zip(rules if whole else rules[1:], waits, strict=False):
        before = one
        one = one.under(rule)
        assert (one.due, one.tail_start, one.store_blocks) == (
            before.due, before.tail_start, before.store_blocks
        )  # fmt: skip
        due = one.turn(n, n + 1, window)
        if due is None:
            continue
        one.call(due)
        assert due <= n + max(window, 1)
        end = max(due, n + 1)
        held += blocks_for(end, size) - blocks_for(n, size)
        n, gain = end, one.gain(end)
        assert gain > 0
        old, new = one.evict(n)
        assert old == before.tail_start < new == rule.tail_start(n)
        held -= gain
        assert one.store_blocks == max(rule.store_blocks(prompt), rule.store_blocks(n))
        # The store, and the positions from the tail on.
        assert held == one.store_blocks + blocks_for(n, size) - new // size
        held += blocks_for(n + wait, size) - blocks_for(n, size)
        n += wait


def test_one_that_waits_for_a_call_may_be_called_at_once():
    rule = Timeline(8, 8, 0, budget_share=0.5)
    one = RequestTimeline(rule, 300, 300, on_demand=True)
    one.call(one.turn(300, 301, 8))
    one.evict(308)
    assert not one.waits, "it evicts once"
    assert one.under(replace(rule, budget_share=0.25)).waits


def test_its_own_eviction_comes_no_later():
    rule = Timeline(8, 8, 64, budget_share=0.5)
    one = RequestTimeline(rule, 300, 300)
    one.evict(300)
    assert one.due == 364
    smaller = one.under(replace(rule, budget_share=0.25))
    assert smaller.turn(340, 341, 8) == 348 and smaller.turn(360, 361, 8) == 364
    assert smaller.turn(370, 371, 8) == 364, "it is due"
    smaller.call(348)
    smaller.evict(348)
    assert smaller.due == 348 + 64


def test_a_store_alone_is_not_evicted_from():
    rule = Timeline(8, 8, 64, budget_share=0.5)
    one = RequestTimeline(rule, 300, 300)
    one.evict(300)
    smaller = one.under(replace(rule, budget_share=0.25))
    assert smaller.gain(303) == 0 and smaller.turn(302, 303, 0) is None
    assert smaller.gain(304) == 1 + 17 - 8

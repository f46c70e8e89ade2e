"""The blocks that suffice for a prompt, against a replay of every eviction."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.rules.replay import Replay, sufficient_blocks
from tests.unit.rules.test_prefill_points import streaming
from tests.unit.rules.test_rule import PROFILE, rules
from vllm_kvevict.rules.layers import by_layer
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule

SHARES = [None, (1.0, 1.0), (1.9, 0.1), (2.1, 0.6, 0.3), (3.4, 0.3, 0.2, 0.1)]


@st.composite
def requests(draw) -> EvictionProgress:
    rule = draw(st.one_of(rules(share=False, recent=True), streaming()))
    rule = replace(rule, protect_first=draw(st.sampled_from([0, 0, 5, 70])))
    if shares := draw(st.sampled_from(SHARES)):
        rule = replace(rule, share=draw(st.sampled_from(by_layer(shares, len(shares)))))
    prompt_len = draw(st.integers(1, 1500))
    end = prompt_len + draw(st.sampled_from([0, 0, 1, 40]))
    return EvictionProgress(
        rule,
        prompt_len,
        end,
        draw(st.none() | st.integers(1, prompt_len)),
        draw(st.none() | st.integers(end + 1, end + 400)),
        draw(st.sampled_from([False, False, False, True])),
        shares_context=draw(st.booleans()),
    )


STREAMS = EvictionRule(16, 32, 128, budget_tokens=352, prefill_interval=160)


@PROFILE
@given(requests(), st.integers(-30, 600))
@example(EvictionProgress(STREAMS, 2000, 2000), 0)
# It ends with the last of several evictions in decode, which are further apart.
@example(EvictionProgress(replace(STREAMS, prefill_interval=16), 1008, 1008), 3 * 128)
@example(EvictionProgress(replace(STREAMS, share=by_layer((3.4, 0.3, 0.3), 3)[0]), 9000, 9000), 0)
def test_as_many_as_a_replay_of_every_eviction_needs(request_, beyond):
    for n in {request_.prefill_end, max(1, request_.prefill_end + beyond)}:
        assert request_.sufficient_blocks(n) == sufficient_blocks(request_, n)


@PROFILE
@given(requests())
def test_the_points_of_a_search_one_by_one(request_):
    """A group that keeps more than the mean begins later, and every point is tried for it."""
    replay = Replay(
        request_.rule, request_.prompt_len, request_.prefill_end, request_.requested_point,
        request_.max_length, request_.on_demand, shares_context=request_.shares_context,
    )  # fmt: skip
    assert request_.points == replay.points


@pytest.mark.parametrize("share", [None, *by_layer((3.4, 0.3, 0.2, 0.1), 4)])
@pytest.mark.parametrize("interval, prefill", [(128, 128), (0, 128), (16, 128), (128, 0)])
def test_it_costs_the_same_at_every_length(interval, prefill, share, monkeypatch):
    calls = 0
    counted = EvictionRule.tail_start

    def tail_start(self: EvictionRule, n: int) -> int:
        nonlocal calls
        calls += 1
        return counted(self, n)

    monkeypatch.setattr(EvictionRule, "tail_start", tail_start)
    rule = EvictionRule(16, 32, interval, 4096, prefill_interval=prefill, share=share)
    found = set()
    for length in (40_000, 4_000_000):
        calls = 0
        request = EvictionProgress(rule, length, length, length // 2)
        assert request.sufficient_blocks(2 * length) <= 2 * length // 16
        found.add(calls)
    assert max(found) < 60

"""The most a request can hold, against walks of every replay that a preemption may cause."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.rules.test_prefill_points import Streaming, streaming
from tests.unit.rules.test_rule import PROFILE, rules
from vllm_kvevict.rules.ceiling import max_blocks_ever
from vllm_kvevict.rules.layers import by_layer
from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule, blocks_for


def held(rule: EvictionRule, prompt_len: int, replay: int, ends: int, at: int | None) -> int:
    """Most blocks of a request that replays ``replay`` tokens and goes on to its end."""
    walk = Streaming(rule, prompt_len, replay, 0, at)
    walk.request = EvictionProgress(rule, prompt_len, replay, at, ends)
    walk.prefill(10**9)
    while walk.n < ends:
        walk.step(1)
    return walk.held


@PROFILE
@given(
    st.one_of(rules(), streaming()),
    st.sampled_from([None, (1.0, 1.0), (1.9, 0.1), (2.1, 0.6, 0.3)]),
    st.integers(1, 700),
    st.integers(1, 300),
    st.none() | st.floats(0.01, 1),
)
@example(EvictionRule(1, 1, 0, 5, prefill_interval=1), (1.9, 0.1), 8, 1, None)
def test_no_replay_holds_more(rule, shares, prompt_len, answer, share):
    at = None if share is None else max(1, round(share * prompt_len))
    ends = prompt_len + answer
    replays = sorted({*range(prompt_len, ends, max(1, answer // 12)), ends - 1})
    for one in by_layer(shares, len(shares)) if shares else [None]:
        mine = replace(rule, share=one)
        most = max_blocks_ever(mine, prompt_len, ends, at)
        needed = max(held(mine, prompt_len, replay, ends, at) for replay in replays)
        assert needed <= most <= blocks_for(ends, rule.block_size)
        # Rounding at either end of the window, a step in flight, and the intervals not met.
        stride = max(mine.stride, mine.prefill_stride) if mine.prefill_stride else 0
        assert most - needed <= 4 + blocks_for(stride, rule.block_size)


def test_a_replay_holds_the_answer_as_well():
    """15,000 tokens of prompt would fit into 1,000 blocks of 16, and 16,200 to replay do not."""
    rule = EvictionRule(16, 32, 128, budget_tokens=1024)
    assert EvictionProgress(rule, 15_000, 15_000).sufficient_blocks(18_000) == 939
    assert max_blocks_ever(rule, 15_000, 18_000) == 1125
    assert max_blocks_ever(replace(rule, prefill_interval=512), 15_000, 18_000) == 62 + 34 + 2
    # A point of its own lets go of the context in every replay, but of nothing behind it.
    assert max_blocks_ever(rule, 15_000, 18_000, requested_point=14_000) == max(
        875, 1125 - 873 + 62
    )
    assert max_blocks_ever(rule, 15_000, 18_000, requested_point=14_000, on_demand=True) == 1125


def test_it_costs_the_same_at_every_length(monkeypatch):
    """No walk from eviction to eviction: as many sums for a million tokens as for a thousand."""
    calls = 0
    counted = EvictionRule.store_blocks

    def store_blocks(self: EvictionRule, length: int) -> int:
        nonlocal calls
        calls += 1
        return counted(self, length)

    monkeypatch.setattr(EvictionRule, "store_blocks", store_blocks)
    rule = EvictionRule(16, 32, 128, budget_tokens=1024, prefill_interval=128)
    found = set()
    for length in (5_000, 1_000_000):
        for mine in (rule, replace(rule, interval=0), replace(rule, prefill_interval=0)):
            calls = 0
            max_blocks_ever(mine, length, 2 * length, length // 2)
            found.add(calls)
    assert max(found) <= 5

"""The share of a request's tokens that an eviction keeps."""

import pytest

from vllm_kvevict.rules.progress import EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule


@pytest.mark.parametrize(
    ("rule", "at", "n", "share"),
    [
        (dict(budget_share=0.25), None, 300, 0.25),
        (dict(budget_share=0.25), None, 900, 0.25),
        # Of a budget in tokens it falls as the answer grows.
        (dict(budget_tokens=100), None, 1000, 0.1),
        (dict(budget_tokens=100), None, 2000, 0.05),
        # Inside of a prompt, or before its point, it is that of the end.
        (dict(budget_tokens=100, prefill_interval=64), None, 300, 0.1),
        (dict(budget_tokens=100), 500, 300, 0.2),
    ],
)
def test_the_share_that_an_eviction_keeps(rule, at, n, share):
    request = EvictionProgress(EvictionRule(16, 32, 64, **rule), 1000, 1000, at)
    assert request.share(n) == pytest.approx(share)


@pytest.mark.parametrize("point", [688, 700])
@pytest.mark.parametrize("budget", [dict(budget_share=0.25), dict(budget_tokens=400)])
def test_what_follows_a_shared_context_is_evicted_when_it_takes_more_than_a_store(point, budget):
    rule = EvictionRule(16, 32, 64, **budget)
    request = EvictionProgress(rule, 720, 720, point, shares_context=True)
    assert request.next_eviction == point
    request.evict(point)
    lengths = range(point + 64, 9000, 64)
    first = -(-point // 16)
    due = next(n for n in lengths if (n - 32) // 16 - first > rule.store_blocks(n))
    assert due > point + 64 and request.next_eviction == due
    request.evict(due)
    assert request.next_eviction == due + 64
    alone = EvictionProgress(rule, 720, 720, point)
    alone.evict(point)
    assert alone.next_eviction == point + 64

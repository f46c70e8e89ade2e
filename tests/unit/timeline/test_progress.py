"""The share of a request's tokens that an eviction keeps."""

import pytest

from vllm_kvevict.timeline.progress import EvictionProgress
from vllm_kvevict.timeline.rule import EvictionRule


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

"""Drafts that are accepted and rejected around evictions change no token.

The n-gram proposer brings numba, beside which vLLM 0.32 starts no second engine in one process.
"""

import pytest

from tests.e2e.test_drafting import run


def of_size(policy: str):
    return pytest.param(policy, marks=() if policy == "ada-snapkv" else pytest.mark.nightly)


@pytest.mark.parametrize(
    "policy", [of_size(policy) for policy in ("ada-snapkv", "pyramidkv", "h2o")]
)
def test_tokens_and_evictions_are_those_without_drafts(policy, tiny_model):
    """Each place around an eviction sees a right draft and a wrong one."""
    found = run("speculation_script", tiny_model, policy)
    assert found["agreed"] == found["total"]
    assert found["full_attention_agreed"] < 0.9 * found["total"]
    assert found["evictions_of_a_request"] >= 3
    assert found["accepted"] > 0 and found["rejected"] > 0
    assert found["postponed"] == found["blocks_leaked"] == 0

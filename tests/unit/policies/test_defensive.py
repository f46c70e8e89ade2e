"""defensive against its definition, number by number."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.unit.ops.test_defensive import spelled_out
from tests.unit.policies.spelled_out import best, cases
from tests.unit.policies.test_policies import random_candidates
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.policies.allocators import Adaptive, Uniform
from vllm_kvevict.policies.base import Requirements
from vllm_kvevict.policies.defensive import Defensive
from vllm_kvevict.policies.registry import build_policy


@settings(deadline=None)
@given(cases())
def test_keeps_the_highest_peaks_times_shares(case):
    expected = []
    for head, peaks in enumerate(spelled_out(case.candidates, 5, 2, 14)):
        shares = case.candidates.value_shares[head].tolist()
        scores = {c: peaks[c] * shares[c] for c in case.columns(head)}
        expected.append(best(scores, case.keep))
    assert case.kept(Defensive()) == expected


def test_policies_and_what_they_read():
    config = EvictionConfig(policy="ada-defensive", options=dict(floor=0.35))
    for name, allocator in [("ada-defensive", Adaptive(0.35)), ("defensive", Uniform())]:
        policy = build_policy(config.model_copy(update={"policy": name}))
        assert policy.allocator == allocator and policy.scorer == Defensive(5, 2, 14)
        needs = Requirements(value_shares=True, floats_per_token=1, heads_alone=True)
        assert policy.requirements == needs


def test_needs_value_shares():
    with pytest.raises(ValueError, match="shares"):
        Defensive().scores(replace(random_candidates(), value_shares=None))

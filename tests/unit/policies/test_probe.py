"""probe against its definition, number by number."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from tests.unit.ops.test_defensive import spelled_out
from tests.unit.policies.spelled_out import best, cases
from tests.unit.policies.test_policies import random_candidates
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.policies.probe import KeyProbe, Probe
from vllm_kvevict.policies.registry import build_policy
from vllm_kvevict.policies.requirements import floats_per_token, ring_slots


def with_scores(case):
    """A case whose tokens were scored by their keys."""
    candidates = case.candidates
    generator = torch.Generator().manual_seed(3)
    shape = candidates.num_heads, candidates.num_candidates
    scores = torch.randn(*shape, 2, generator=generator)
    weights = torch.rand(candidates.num_heads, generator=generator)
    case.candidates = replace(candidates, key_scores=scores, window_weights=weights)
    return case


@settings(deadline=None)
@given(cases().map(with_scores))
def test_with_a_window_both_are_joined(case):
    expected = []
    for head, peaks in enumerate(spelled_out(case.candidates, 5, 2, 14)):
        said = case.candidates.key_scores[head, :, 1].tolist()
        weight = float(case.candidates.window_weights[head])
        scores = {c: said[c] + weight * math.log(max(peaks[c], 1e-6)) for c in case.columns(head)}
        expected.append(best(scores, case.keep))
    assert case.kept(Probe()) == expected


@settings(deadline=None)
@given(cases().map(with_scores))
def test_without_one_the_keys_alone_count(case):
    case.candidates = replace(case.candidates, queries=None)
    expected = []
    for head in range(case.candidates.num_heads):
        said = case.candidates.key_scores[head, :, 0].tolist()
        expected.append(best({c: said[c] for c in case.columns(head)}, case.keep))
    assert case.kept(Probe()) == case.kept(KeyProbe()) == expected


def test_what_it_reads_and_keeps():
    auto = EvictionConfig(policy="ada-probe", profile="x.json")
    for name in ("probe", "ada-probe"):
        policy = build_policy(auto.model_copy(update={"policy": name}))
        assert policy.scorer == Probe(5, 2, 14)
        assert policy.requirements.window == "optional" and not policy.requirements.keys
    assert floats_per_token(auto) == 2
    none = EvictionConfig(policy="ada-probe", profile="x.json", options=dict(probe_window="none"))
    assert isinstance(build_policy(none).scorer, KeyProbe)
    assert build_policy(none).requirements.window == "none"
    assert floats_per_token(none) == 1
    assert ring_slots(None, none) == 0, "no memory for a window that nobody reads"


def test_needs_scores_of_keys():
    with pytest.raises(ValueError, match="scores of the keys"):
        Probe().scores(replace(random_candidates(), key_scores=None))

"""SubGen's section 3.2 against farthest-first traversal, number by number."""

import math
from dataclasses import replace

import torch
from hypothesis import given, settings

from tests.unit.policies.spelled_out import cases
from tests.unit.policies.test_policies import random_candidates
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.torch.select import select_tokens
from vllm_kvevict.policies.base import protect
from vllm_kvevict.policies.registry import build_policy
from vllm_kvevict.policies.subgen import SubGen


def farthest_first(keys: list[list[float]], columns: list[int], k: int) -> list[int]:
    centers = columns[:1]
    while len(centers) < k:
        nearest = {
            column: min(math.dist(keys[column], keys[center]) for center in centers)
            for column in columns
            if column not in centers
        }
        centers.append(max(nearest, key=lambda column: (nearest[column], -column)))
    return centers


@settings(deadline=None)
@given(cases())
def test_the_centers_of_the_keys_are_kept(case):
    expected, ranked = [], []
    for head in range(case.candidates.num_heads):
        keys = case.candidates.keys[head].double().tolist()
        ranked.append(farthest_first(keys, case.columns(head), case.keep))
        expected.append(sorted(ranked[-1]))
    scorer = build_policy(EvictionConfig(policy="subgen")).scorer
    assert case.kept(scorer) == expected
    order = scorer.scores(case.candidates).argsort(dim=-1, descending=True, stable=True)
    assert order[:, : case.keep].tolist() == ranked, "the first centres rank first"


def test_neither_queries_nor_tokens_that_stay_matter():
    candidates = replace(random_candidates((0, 4)), keep=12)
    keys = candidates.keys.clone()
    keys[:, 24:] = math.nan
    scores = SubGen().scores(candidates)
    assert torch.equal(scores, SubGen().scores(replace(candidates, queries=None, keys=keys)))
    assert SubGen.requirements.window == "none"


def test_protected_tokens_take_the_place_of_the_last_centers():
    candidates = replace(random_candidates((0, 0)), keep=12)
    scores = protect(SubGen().scores(candidates), candidates.valid, 4)
    kept = select_tokens(scores[None], torch.tensor([[12, 12]]), 1)[0].split(12)
    for head, columns in enumerate(kept):
        keys = candidates.keys[head].double().tolist()
        centers = farthest_first(keys, list(range(24)), 12)
        expected = [0, 1, 2, 3, *[c for c in centers if c > 3][:8]]
        assert columns.tolist() == sorted(expected)

"""Scissorhands against its paper, number by number."""

import math

import torch
from hypothesis import event, given, settings

from tests.unit.policies.spelled_out import attention, cases
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.torch.select import select_tokens
from vllm_kvevict.policies.base import Candidates
from vllm_kvevict.policies.registry import build_policy
from vllm_kvevict.policies.scissorhands import Scissorhands


def importance_record(case, head: int) -> dict[int, tuple[int, float]]:
    """Of each evictable token: low scores in the history window, and less the sum of weights."""
    record = dict.fromkeys(case.columns(head), (0, 0.0))
    for query_head in attention(case.candidates, head):
        for weights in query_head:
            t = len(weights)
            for column, (lows, less) in record.items():
                low = weights[column] < 1 / t
                record[column] = (lows + low, less - weights[column])
    return record


@settings(deadline=None, max_examples=200)
@given(cases())
def test_tokens_with_fewest_low_scores_are_kept(case):
    expected = []
    for head in range(case.candidates.num_heads):
        record = importance_record(case, head)
        ranked = sorted(record, key=lambda column: (*record[column], column))
        expected.append(sorted(ranked[: case.keep]))
        counts = [lows for lows, _ in record.values()]
        event("counts tie" if len(set(counts)) < len(counts) else "counts differ")
    for name in ("scissorhands", "ada-scissorhands"):
        assert case.kept(build_policy(EvictionConfig(policy=name)).scorer) == expected


def test_often_above_the_mean_wins_over_one_high_peak():
    """Token 2 holds nearly all the weight of one query; token 0 is above the mean for both."""
    weights = torch.tensor(
        [[0.30, 0.02, 0.60, 0.05, 0.03, 0.0], [0.30, 0.02, 0.01, 0.1, 0.1, 0.47]]
    )
    keys = weights.clamp(min=1e-9).log().T[None]
    candidates = Candidates(
        keys=keys,
        valid=torch.ones(1, 6, dtype=torch.bool),
        queries=torch.eye(2)[None, None],
        window=2,
        num_candidates=4,
        scale=1.0,
    )
    scores = Scissorhands().scores(candidates)
    assert weights.sum(0)[2] == weights.sum(0).max()
    kept = select_tokens(scores[None], torch.tensor([[2]]), 1)
    assert kept.tolist() == [[0, 2]]
    assert scores[0].argmax() == 0


def test_the_mean_of_a_head_with_less_tokens_is_higher():
    """Five tokens are seen where padding hides three of eight: 0.15 is low there, not beside."""
    weights = torch.tensor([0.0, 0.0, 0.0, 0.15, 0.4, 0.25, 0.1, 0.1])
    keys = torch.stack([weights, weights]).clamp(min=1e-9).log()[..., None]
    keys[0, :3] = math.nan
    candidates = Candidates(
        keys=keys,
        valid=torch.arange(8) >= torch.tensor([[3], [0]]),
        queries=torch.ones(2, 1, 1, 1),
        window=1,
        num_candidates=6,
        scale=1.0,
    )
    counts = Scissorhands().scores(candidates)[:, 3:6].floor()
    assert counts.tolist() == [[0, 1, 1], [1, 1, 1]]


def test_equal_counts_keep_what_weighs_most_among_many():
    """Of 100 000 tokens nearly all are always low; float32 still tells their weights apart."""
    tokens = 100_000
    keys = torch.linspace(0.0, 1.0, tokens)[torch.randperm(tokens)][None, :, None]
    candidates = Candidates(
        keys=torch.cat([keys, torch.full((1, 4, 1), 12.0)], 1),
        valid=torch.ones(1, tokens + 4, dtype=torch.bool),
        queries=torch.ones(1, 8, 4, 1),
        window=4,
        num_candidates=tokens,
        scale=1.0,
    )
    scores = Scissorhands().scores(candidates)
    assert scores.max() < 1, "all are low, for every query"
    kept = select_tokens(scores[None], torch.tensor([[1]]), 1000)[0]
    best = keys[0, :, 0].argsort(descending=True)[:1000].sort().values
    assert len(set(kept.tolist()) & set(best.tolist())) >= 995

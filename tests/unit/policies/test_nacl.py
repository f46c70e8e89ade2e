"""NACL against Algorithm 1, number by number; its draws are checked in tests/unit/ops."""

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.policies.spelled_out import attention, best, cases
from tests.unit.policies.test_policies import random_candidates
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.torch.sample import digest, gumbel
from vllm_kvevict.ops.torch.select import select_tokens
from vllm_kvevict.policies.base import Candidates, Requirements, protect
from vllm_kvevict.policies.nacl import NACL
from vllm_kvevict.policies.registry import build_policy


def column_sums(case, head: int) -> dict[int, float]:
    """F_score: each proxy's softmax, summed over proxies, averaged over query heads."""
    group = attention(case.candidates, head)
    return {
        column: math.fsum(row[column] for rows in group for row in rows) / len(group)
        for column in case.columns(head)
    }


@settings(deadline=None, max_examples=100)
@given(cases(), st.floats(0, 1), st.integers(0, 2**63 - 1), st.integers(0, 99), st.integers(0, 9))
def test_algorithm_1(case, share, seed, layer, first_head):
    case.candidates = replace(case.candidates, layer=layer, first_head=first_head)
    expected = []
    for head in range(case.candidates.num_heads):
        f_score = column_sums(case, head)
        num_random = round(share * case.keep)
        u_score = best(f_score, case.keep - num_random)
        where = digest((seed, *case.candidates.seed, layer, first_head + head))
        drawn = dict(zip(f_score, gumbel(where, len(f_score)).tolist(), strict=True))
        rest = {c: f_score[c] + drawn[c] for c in f_score if c not in u_score}
        u_random = best(rest, num_random)
        assert len(u_score) + len(u_random) == case.keep
        expected.append(sorted([*u_score, *u_random]))
    assert case.kept(NACL(share, seed)) == expected


@settings(deadline=None, max_examples=50)
@given(cases(), st.integers(2, 4), st.integers(0, 99))
def test_layers_together_draw_like_each_alone(case, layers, first_head):
    numbers = tuple(range(10, 10 + layers))
    alone = [replace(case.candidates, layer=n, first_head=first_head) for n in numbers]
    together = replace(
        alone[0],
        keys=alone[0].keys.repeat(layers, 1, 1),
        queries=alone[0].queries.repeat(layers, 1, 1, 1),
        valid=alone[0].valid.repeat(layers, 1),
        layers=numbers,
    )
    scorer = NACL(0.5, 3)
    torch.testing.assert_close(
        scorer.scores(together), torch.cat([scorer.scores(layer) for layer in alone])
    )


def peaked(window: int = 64) -> Candidates:
    """Five tokens with F_score about 2, 1, 0.5, 0.2 and 30, where the window takes the rest."""
    weights = torch.tensor([2.0, 1.0, 0.5, 0.2, 30.0]) / window
    keys = torch.cat([weights.log(), torch.full((window,), -30.0)])
    keys[5] = math.log(1 - float(weights.sum()))
    return Candidates(
        keys=keys[None, :, None],
        valid=torch.ones(1, len(keys), dtype=torch.bool),
        queries=torch.ones(1, 1, window, 1),
        window=window,
        num_candidates=5,
        scale=1.0,
        keep=3,
    )


def test_the_others_are_drawn_from_the_softmax_of_their_scores():
    candidates, rounds = peaked(), 3000
    scorer = NACL(random_share=0.67, seed=5)
    weights = [math.exp(x) for x in (2.0, 1.0, 0.5, 0.2)]
    counts = Counter()
    for number in range(rounds):
        scores = scorer.scores(replace(candidates, seed=(number,)))
        kept = select_tokens(scores[None], torch.tensor([[3]]), 1)[0].tolist()
        assert kept[-1] == 4, "the best token is kept for its score"
        counts[tuple(kept[:2])] += 1
    for pair in combinations(range(4), 2):
        chance = sum(
            weights[a] / sum(weights) * weights[b] / (sum(weights) - weights[a])
            for a, b in (pair, pair[::-1])
        )
        spread = math.sqrt(rounds * chance * (1 - chance))
        assert abs(counts[pair] - rounds * chance) < 4 * spread


def kept(scorer: NACL, candidates: Candidates) -> list[list[int]]:
    pages = torch.full((1, candidates.num_heads), candidates.keep)
    columns = select_tokens(scorer.scores(candidates)[None], pages, 1)[0]
    return [row.tolist() for row in columns.split(candidates.keep)]


@pytest.mark.parametrize(
    "other", [dict(seed=(1, 8)), dict(seed=(2, 7)), dict(layer=1), dict(first_head=2)]
)
def test_draws_differ_by_request_length_layer_and_head(other):
    candidates = replace(random_candidates((0, 0)), keep=12, seed=(1, 7))
    assert kept(NACL(), candidates) == kept(NACL(), candidates)
    assert kept(NACL(), candidates) != kept(NACL(), replace(candidates, **other))
    assert kept(NACL(), candidates) != kept(NACL(seed=1), candidates)
    alike = replace(
        candidates,
        keys=candidates.keys[:1].expand(2, -1, -1),
        queries=candidates.queries[:1].expand(2, -1, -1, -1),
    )
    first, second = kept(NACL(), alike)
    assert first != second, "heads draw apart"


def test_a_rank_draws_what_one_rank_alone_draws_for_its_heads():
    both = replace(random_candidates((0, 4)), keep=12, seed=(1, 7))
    whole = kept(NACL(), both)
    for head in range(2):
        one = slice(head, head + 1)
        mine = replace(
            both, keys=both.keys[one], valid=both.valid[one], queries=both.queries[one],
            first_head=head,
        )  # fmt: skip
        assert kept(NACL(), mine) == whole[one]


def test_padding_does_not_shift_the_draws():
    """A token's draw depends on how many older ones its head holds, not on the grid's width."""
    narrow = replace(random_candidates((0, 0)), keep=12, seed=(1, 7))
    pad = torch.full((2, 4, 8), math.nan)
    wide = replace(
        narrow,
        keys=torch.cat([pad, narrow.keys], 1),
        valid=torch.cat([torch.zeros(2, 4, dtype=torch.bool), narrow.valid], 1),
        num_candidates=narrow.num_candidates + 4,
    )
    moved = [[column + 4 for column in row] for row in kept(NACL(), narrow)]
    assert kept(NACL(), wide) == moved


def test_no_share_and_all_of_it():
    candidates = replace(random_candidates((0, 0)), keep=12, seed=(1, 7))
    snapkv = build_policy(EvictionConfig(policy="snapkv", options=dict(pool_kernel=1))).scorer
    assert kept(NACL(random_share=0.0), candidates) == kept(snapkv, candidates)
    assert kept(NACL(random_share=1.0), candidates) != kept(snapkv, candidates)


def test_protected_tokens_take_the_place_of_the_last_drawn():
    candidates = replace(random_candidates((0, 0)), keep=12, seed=(1, 7))
    scores = NACL().scores(candidates)
    guarded = protect(scores, candidates.valid, 6)
    for free, mine in zip(scores, guarded, strict=True):
        ranked = [c for c in free.argsort(descending=True).tolist() if c >= 6]
        assert sorted(mine.topk(12).indices.tolist()) == sorted([*range(6), *ranked[:6]])


def test_flags_reach_the_scorer_and_heads_share_no_budget():
    config = EvictionConfig(policy="nacl", options=dict(random_share=0.25, seed=9))
    assert build_policy(config).scorer == NACL(0.25, 9)
    assert NACL.requirements == Requirements(window="required", random=True, layers_alone=True)

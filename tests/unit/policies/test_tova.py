"""TOVA against its paper, number by number."""

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.policies.spelled_out import attention, best, cases
from tests.unit.policies.test_policies import random_candidates
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.policies.registry import build_policy
from vllm_kvevict.policies.tova import TOVA


def last_query(candidates, head: int) -> list[dict[int, float]]:
    """[G] what the newest query gives each column."""
    return [rows[-1] for rows in attention(candidates, head)]


@settings(deadline=None)
@given(cases(ragged=False))
def test_all_heads_keep_what_their_average_attends_to(case):
    heads = range(case.candidates.num_heads)
    rows = [row for head in heads for row in last_query(case.candidates, head)]
    average = {c: math.fsum(row[c] for row in rows) / len(rows) for c in case.columns(0)}
    assert case.kept(TOVA()) == [best(average, case.keep)] * len(heads)
    scores = TOVA().scores(case.candidates)
    torch.testing.assert_close(
        scores, torch.tensor([list(average.values())] * len(heads), dtype=torch.float32)
    )


@settings(deadline=None)
@given(cases())
def test_heads_with_budgets_of_their_own_look_at_their_own_queries(case):
    scorer = build_policy(EvictionConfig(policy="ada-tova")).scorer
    expected = []
    for head in range(case.candidates.num_heads):
        rows = last_query(case.candidates, head)
        average = {c: math.fsum(row[c] for row in rows) / len(rows) for c in case.columns(head)}
        expected.append(best(average, case.keep))
    assert case.kept(scorer) == expected


@settings(deadline=None, max_examples=20)
@given(cases(ragged=False))
def test_two_ranks_score_like_one(case):
    """Each rank holds some of the heads; what the ranks average is the same on both."""
    both = case.candidates
    heads = both.num_heads
    parts = [
        replace(both, keys=k, valid=v, queries=q)
        for k, v, q in zip(
            both.keys.split(1), both.valid.split(1), both.queries.split(1), strict=True
        )
    ]
    sent = []
    for part in parts:
        TOVA().scores(replace(part, mean_of_ranks=lambda tensor: sent.append(tensor) or tensor))
    assert [tensor.shape[0] for tensor in sent] == [1] * heads
    average = torch.stack(sent).mean(0)
    for part in parts:
        scores = TOVA().scores(replace(part, mean_of_ranks=lambda tensor: average))
        torch.testing.assert_close(scores, TOVA().scores(both)[:1])


@settings(deadline=None, max_examples=50)
@given(cases(ragged=False), st.integers(1, 4), st.integers(0, 2**31))
def test_layers_together_score_like_each_alone(case, layers, seed):
    """The heads of a layer are averaged with each other, and with no head of another layer."""
    one, generator = case.candidates, torch.Generator().manual_seed(seed)
    alone = [
        replace(one, **{
            name: torch.randn(getattr(one, name).shape, generator=generator)
            for name in ("keys", "queries")
        })
        for _ in range(layers)
    ]  # fmt: skip
    together = replace(
        one,
        keys=torch.cat([layer.keys for layer in alone]),
        queries=torch.cat([layer.queries for layer in alone]),
        valid=one.valid.repeat(layers, 1),
        layers=tuple(range(layers)),
    )
    for scorer in (TOVA(), TOVA("group")):
        scores = scorer.scores(together).unflatten(0, (layers, -1))
        for mine, layer in zip(scores, alone, strict=True):
            rows = [last_query(layer, head) for head in range(layer.num_heads)]
            if scorer.heads == "layer":
                rows = [[row for head in rows for row in head]] * layer.num_heads
            expected = [
                [math.fsum(row[c] for row in head) / len(head) for c in case.columns(0)]
                for head in rows
            ]
            torch.testing.assert_close(mine, torch.tensor(expected, dtype=torch.float32))


def test_older_queries_do_not_matter():
    generator = torch.Generator().manual_seed(0)
    candidates = random_candidates(padding=(0, 0))
    noise = torch.randn(candidates.queries[:, :, :-1].shape, generator=generator)
    other = torch.cat([noise, candidates.queries[:, :, -1:]], 2)
    changed = replace(candidates, queries=other)
    assert torch.equal(TOVA().scores(candidates), TOVA().scores(changed))

"""What all policies have in common, through the contract that the worker uses."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import POLICY_NAMES
from vllm_kvevict.ops.torch.select import select_tokens
from vllm_kvevict.policies.allocators import Adaptive, Uniform
from vllm_kvevict.policies.base import Candidates, protect
from vllm_kvevict.policies.defensive import Defensive
from vllm_kvevict.policies.h2o import H2O
from vllm_kvevict.policies.nacl import NACL
from vllm_kvevict.policies.probe import Probe
from vllm_kvevict.policies.registry import build_policy
from vllm_kvevict.policies.snapkv import SnapKV
from vllm_kvevict.policies.streaming_llm import StreamingLLM
from vllm_kvevict.policies.subgen_stream import SubGenStream


def random_candidates(
    padding=(0, 4), evictable=24, rest=3, window=4, softcap=0.0, seed=1, layer=0
) -> Candidates:
    generator = torch.Generator().manual_seed(seed)
    columns = evictable + rest + window
    return Candidates(
        keys=2 * torch.randn(len(padding), columns, 8, generator=generator),
        valid=torch.arange(columns) >= torch.tensor(padding)[:, None],
        queries=torch.randn(len(padding), 3, window, 8, generator=generator),
        window=window,
        num_candidates=evictable,
        scale=8**-0.5,
        softcap=softcap,
        keep=12,
        seed=(1, 7),
        layer=layer,
        state_row=0,
        values=torch.randn(len(padding), columns, 8, generator=generator),
        value_shares=torch.rand(len(padding), columns, generator=generator),
        accumulated=torch.rand(len(padding), columns, generator=generator),
        key_scores=torch.randn(len(padding), evictable, 2, generator=generator),
        window_weights=torch.rand(len(padding), generator=generator),
    )


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_contract(name):
    config = EvictionConfig(policy=name, budget=64, window=4)
    policy = build_policy(config)
    candidates = random_candidates()
    scores = policy.scorer.scores(candidates)
    assert (policy.name, scores.dtype, scores.shape) == (name, torch.float32, (2, 24))
    assert torch.equal(scores == float("-inf"), ~candidates.valid[:, :24])
    pages = policy.allocator.pages(scores[None], torch.tensor([[6, 5]]), 3, 4)
    assert pages.sum().item() == 6
    assert select_tokens(scores[None], pages, 4).shape == (1, 24)


@pytest.mark.parametrize("name", ["snapkv", "ada-snapkv"])
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_snapkv_pools_across_the_last_candidate(name, kind):
    """Tokens between the candidates and the window count as neighbours: pool, then cut."""
    settings = dict(policy=name, budget=64, window=4)
    candidates = random_candidates(padding=(0, 0), softcap=3.0)
    raw = torch.zeros(2, 27)
    for head in range(2):
        rows = []
        for query_head in candidates.queries[head]:
            for i, query in enumerate(query_head):
                logits = candidates.keys[head, : 27 + i + 1] @ query * candidates.scale
                rows.append(functional.softmax(3.0 * torch.tanh(logits / 3.0), 0)[:27])
        raw[head] = torch.stack(rows).mean(0)
    function = {"max": functional.max_pool1d, "avg": functional.avg_pool1d}[kind]
    for kernel in (1, 7):
        scorer = build_policy(
            EvictionConfig(options=dict(pool=kind, pool_kernel=kernel), **settings)
        ).scorer
        expected = function(raw, kernel, stride=1, padding=kernel // 2)[:, :24]
        torch.testing.assert_close(scorer.scores(candidates), expected)


SCORERS = {
    "snapkv": (SnapKV(3, "avg"), dict(pool_kernel=3, pool="avg")),
    "defensive": (Defensive(5, 2, 14), {}),
    "probe": (Probe(5, 2, 14), {}),
    "h2o": (H2O(0.25), dict(recent_share=0.25)),
    "streaming-llm": (StreamingLLM(2), dict(sinks=2)),
    "nacl": (NACL(0.25, 9), dict(random_share=0.25, seed=9)),
    "subgen-stream": (
        SubGenStream(0.5, 2, 0.4, 3),
        dict(radius=0.5, cluster_samples=2, value_share=0.4, seed=3),
    ),
}


@pytest.mark.parametrize("name", SCORERS)
def test_options_reach_the_scorer(name):
    scorer, options = SCORERS[name]
    assert build_policy(EvictionConfig(policy=name, options=options)).scorer == scorer


@pytest.mark.parametrize(
    ("name", "missing", "says"),
    [
        ("defensive", "value_shares", "shares of the value norms"),
        ("probe", "key_scores", "scores of the keys"),
        ("h2o", "accumulated", "attention of all queries"),
        ("subgen-stream", "values", "needs the values"),
    ],
)
def test_a_missing_input_is_named(name, missing, says):
    scorer = build_policy(EvictionConfig(policy=name)).scorer
    with pytest.raises(ValueError, match=says):
        scorer.scores(replace(random_candidates(), **{missing: None}))


PER_HEAD = ("keys", "valid", "queries", "values", "value_shares", "accumulated", "key_scores",
            "window_weights")  # fmt: skip
"""Inputs with one row for each head."""


def order(scores: torch.Tensor) -> torch.Tensor:
    return scores.argsort(dim=-1, descending=True, stable=True)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_heads_of_several_layers_score_like_each_layer_alone(name):
    """Where a policy says so, a GPU passes them at once."""
    policy = build_policy(EvictionConfig(policy=name, budget=64, window=4))
    needs = policy.requirements
    if not (needs.heads_alone or needs.layers_alone):
        return
    first = random_candidates((0, 0), layer=7)
    second = replace(random_candidates((0, 4), seed=2), layer=8, seed=first.seed)
    both = {each: torch.cat([getattr(first, each), getattr(second, each)]) for each in PER_HEAD}
    together = policy.scorer.scores(replace(first, layers=(7, 8), **both))
    alone = [policy.scorer.scores(layer) for layer in (first, second)]
    assert not torch.equal(*alone)
    torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize("name", [n for n in POLICY_NAMES if n != "tova"])
def test_a_rank_scores_what_one_rank_alone_scores_for_its_heads(name):
    both = random_candidates((0, 4))
    scorer = build_policy(EvictionConfig(policy=name, budget=64, window=4)).scorer.per_head()
    whole = scorer.scores(both)
    for head in range(2):
        mine = {each: getattr(both, each)[head : head + 1] for each in PER_HEAD}
        torch.testing.assert_close(
            scorer.scores(replace(both, first_head=head, **mine)), whole[head : head + 1]
        )


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_padding_does_not_shift_what_is_kept(name):
    """A head's tokens count from its oldest one, not from the left of the grid."""
    narrow = random_candidates((0, 0))
    scorer = build_policy(EvictionConfig(policy=name, budget=64, window=4)).scorer
    wide = {}
    for each in set(PER_HEAD) - {"queries", "window_weights"}:
        rows = getattr(narrow, each)
        pad = rows.new_full((2, 4, *rows.shape[2:]), 0 if each == "valid" else math.nan)
        wide[each] = torch.cat([pad, rows], 1)
    kept = order(scorer.scores(narrow))
    assert torch.equal(
        order(scorer.scores(replace(narrow, num_candidates=28, **wide)))[:, :24], kept + 4
    )


def test_adaptive_follows_its_floor():
    scores = torch.stack([torch.zeros(20), torch.ones(20)])[None]
    caps = torch.tensor([[10, 10]])
    for floor, expected in [(0.0, [1, 9]), (0.4, [2, 8]), (1.0, [5, 5])]:
        assert Adaptive(floor).pages(scores, caps, 5, 2).tolist() == [expected]
    assert Uniform().pages(scores, caps, 5, 2).tolist() == [[5, 5]]


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("first", [1, 5, 8, 12])
def test_protected_tokens_are_the_first_survivors_of_every_head(name, first):
    """Twice: at a re-eviction the first survivors are the first columns again.

    They take the places of the tokens that the policy ranks last.
    """
    policy = build_policy(EvictionConfig(policy=name, budget=64, window=4))
    candidates = random_candidates(padding=(0, 4))
    caps = torch.tensor([[6, 5]])
    for _ in range(2):
        valid = candidates.valid[:, :24]
        free = policy.scorer.scores(candidates)
        scores = protect(free, candidates.valid, first)
        assert torch.isfinite(scores[valid]).all()
        assert torch.equal(scores == float("-inf"), ~valid)
        pages = policy.allocator.pages(scores[None], caps, 3, 4)
        columns = select_tokens(scores[None], pages, 4)[0].split((4 * pages[0]).tolist())
        for head, kept in enumerate(columns):
            begin = int((~valid[head]).sum())
            guarded = list(range(begin, begin + first))
            assert kept[:first].tolist() == guarded
            if policy.allocator == Uniform():
                ranked = [c for c in order(free)[head].tolist() if c not in guarded]
                assert kept.tolist() == sorted(guarded + ranked[: 12 - first])
        candidates = random_candidates(padding=(8, 0))
        caps = torch.tensor([[4, 6]])


def test_nothing_is_protected_by_default():
    scores = torch.tensor([[0.5, 0.25]])
    assert protect(scores, torch.ones(1, 9, dtype=torch.bool), 0) is scores


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_key_that_is_no_number_costs_no_other_head_its_tokens(name, odd):
    """Every head still fills its pages with tokens it has; uniform budgets stay independent."""
    candidates = random_candidates(padding=(0, 4))
    broken = candidates.keys.clone()
    broken[0, 7, 3] = odd
    policy = build_policy(EvictionConfig(policy=name, budget=64, window=4))
    caps = torch.tensor([[6, 5]])
    kept = []
    for keys in (broken, candidates.keys):
        scores = policy.scorer.scores(replace(candidates, keys=keys))[None]
        assert torch.equal(scores[0] == float("-inf"), ~candidates.valid[:, :24])
        pages = policy.allocator.pages(scores, caps, 3, 4)
        assert pages.sum() == 6 and bool((pages >= 1).all()) and bool((pages <= caps).all())
        kept.append(select_tokens(scores, pages, 4)[0].split((4 * pages[0]).tolist()))
        for head, columns in enumerate(kept[-1]):
            assert candidates.valid[head, columns].all() and len(set(columns.tolist())) > 3
    if policy.allocator == Uniform() and name != "tova":
        assert kept[0][1].tolist() == kept[1][1].tolist()

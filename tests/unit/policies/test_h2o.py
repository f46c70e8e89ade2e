"""H2O: heavy hitters and recent tokens, spelled out."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.policies.spelled_out import best, cases
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.torch.select import select_tokens
from vllm_kvevict.policies.allocators import Adaptive
from vllm_kvevict.policies.base import Candidates, protect
from vllm_kvevict.policies.h2o import EXACT, H2O, RECENT, STEP
from vllm_kvevict.policies.registry import build_policy

SHARES = st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0])


def accumulated(case, draw, ties: bool):
    """Sums as the worker has them: anything in the padding."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = case.candidates.valid.shape
    sums = 50 * torch.rand(shape, generator=generator) ** 4
    sums = sums.round() if ties else sums
    garbage = draw(st.sampled_from([math.nan, math.inf, 9.0]))
    return replace(
        case,
        candidates=replace(
            case.candidates,
            queries=None,
            accumulated=sums.masked_fill(~case.candidates.valid, garbage),
        ),
    )


def one_head(sums: torch.Tensor | None, window: int, keep: int) -> Candidates:
    """One head whose tokens before the window may all be evicted."""
    tokens = 20 if sums is None else sums.shape[1]
    return Candidates(
        keys=torch.zeros(1, tokens, 1),
        valid=torch.ones(1, tokens, dtype=torch.bool),
        queries=None,
        window=window,
        num_candidates=tokens - window,
        scale=1.0,
        keep=keep,
        accumulated=sums,
    )


def recent_columns(case, share: float) -> int:
    """Evictable columns among the last tokens that ``share`` of the budget stands for."""
    candidates = case.candidates
    kept_anyway = candidates.valid.shape[1] - candidates.num_candidates
    return max(0, round(share * (case.keep + candidates.window)) - kept_anyway)


@given(case=cases(), share=SHARES, ties=st.booleans(), data=st.data())
def test_every_head_keeps_recent_tokens_and_heavy_hitters(case, share, ties, data):
    case = accumulated(case, data.draw, ties)
    recent = recent_columns(case, share)
    for head, columns in enumerate(case.kept(H2O(share))):
        mine = case.columns(head)
        latest = mine[len(mine) - recent :]
        sums = case.candidates.accumulated[head].tolist()
        others = {c: sums[c] for c in mine if c not in latest}
        assert columns == sorted(best(others, case.keep - len(latest)) + latest)


def test_half_the_budget_is_recent():
    """100 tokens, a budget of 40 with a window of 8: the last 20, and the 20 heaviest before."""
    sums = torch.rand(1, 100, generator=torch.Generator().manual_seed(0))
    scores = H2O().scores(one_head(sums, window=8, keep=32))
    kept = select_tokens(scores[None], torch.tensor([[32]]), 1)[0].tolist()
    heavy = sums[0, :80].topk(20).indices.tolist()
    assert kept + list(range(92, 100)) == sorted(heavy) + list(range(80, 100))


@given(case=cases(), share=SHARES, first=st.integers(0, 9), floor=st.sampled_from([0.0, 0.2, 1.0]),
       data=st.data())  # fmt: skip
def test_adaptive_heads_all_keep_recent_and_protected_tokens(case, share, first, floor, data):
    """What budget moves between heads are heavy hitters only."""
    case = accumulated(case, data.draw, ties=False)
    candidates, bs = case.candidates, case.block_size
    recent = recent_columns(case, share)
    valid = candidates.valid[:, : candidates.num_candidates]
    assume(first + recent <= case.keep and int(valid.sum(-1).min()) >= first + recent)
    scores = protect(H2O(share).scores(candidates), candidates.valid, first)[None]
    caps = valid.sum(-1)[None] // bs
    pages = Adaptive(floor).pages(scores, caps, case.store_blocks, bs)
    columns = select_tokens(scores, pages, bs)[0].split((pages[0] * bs).tolist())
    for head, kept in enumerate(columns):
        mine = case.columns(head)
        assert set(mine[:first]) | set(mine[len(mine) - recent :]) <= set(kept.tolist())


def test_without_room_for_all_the_youngest_recent_tokens_stay():
    """Protected tokens come first; then recent ones, from the last on."""
    candidates = one_head(1e6 * torch.rand(1, 20), window=2, keep=8)
    scores = protect(H2O(1.0).scores(candidates), candidates.valid, 5)
    kept = select_tokens(scores[None], torch.tensor([[8]]), 1)[0].tolist()
    assert kept == [0, 1, 2, 3, 4, 15, 16, 17]


def test_scores_stay_exact_for_the_longest_prompts():
    """Every recent token has a score of its own, above a million queries' worth of attention."""
    ranks = torch.tensor([0, 1, 2**20, EXACT - 2, EXACT - 1], dtype=torch.float32)
    scores = RECENT + STEP * ranks
    assert len(set(scores.tolist())) == 5 and scores.min() > 1e9
    assert scores.double().tolist() == [RECENT + STEP * rank for rank in ranks.tolist()]


def test_config_and_missing_sums():
    policy = build_policy(EvictionConfig(policy="h2o", options=dict(recent_share=0.25)))
    assert policy.scorer == H2O(0.25)
    assert policy.requirements.every_query and policy.requirements.window == "none"
    assert policy.requirements.floats_per_token == 1
    assert isinstance(build_policy(EvictionConfig(policy="ada-h2o")).allocator, Adaptive)
    with pytest.raises(ValueError, match="attention of all queries"):
        policy.scorer.scores(one_head(None, window=2, keep=8))

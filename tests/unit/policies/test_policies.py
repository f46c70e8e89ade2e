"""What each policy keeps, through the contract that the worker uses."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import POLICY_NAMES
from vllm_kvevict.ops.torch.select import select_tokens
from vllm_kvevict.policies.allocators import Adaptive, Uniform
from vllm_kvevict.policies.base import Candidates, protect
from vllm_kvevict.policies.registry import build_policy
from vllm_kvevict.policies.streaming_llm import StreamingLLM


def random_candidates(padding=(0, 4), evictable=24, rest=3, window=4, softcap=0.0) -> Candidates:
    generator = torch.Generator().manual_seed(1)
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
        state_row=0,
        values=torch.randn(len(padding), columns, 8, generator=generator),
        value_shares=torch.rand(len(padding), columns, generator=generator),
        accumulated=torch.rand(len(padding), columns, generator=generator),
        key_scores=torch.randn(len(padding), evictable, 2, generator=generator),
        window_weights=torch.rand(len(padding), generator=generator),
    )


def bare(columns: int, padding=(0,)) -> Candidates:
    """One candidate grid for a policy that reads neither keys nor queries."""
    valid = torch.arange(columns + 2) >= torch.tensor(padding)[:, None]
    return Candidates(torch.empty(len(padding), 0, 1), valid, None, 2, columns, 1.0)


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


def test_snapkv_needs_the_window_and_streaming_llm_does_not():
    needs = {
        n: build_policy(EvictionConfig(policy=n)).requirements.window == "required"
        for n in POLICY_NAMES
    }
    assert needs["snapkv"] and needs["ada-snapkv"] and not needs["streaming-llm"]


def test_allocators_of_the_policies():
    config = EvictionConfig(policy="ada-snapkv", options=dict(floor=0.35))
    assert build_policy(config).allocator == Adaptive(0.35)
    for name in ("snapkv", "streaming-llm"):
        assert build_policy(config.model_copy(update={"policy": name})).allocator == Uniform()


def test_adaptive_follows_its_floor():
    scores = torch.stack([torch.zeros(20), torch.ones(20)])[None]
    caps = torch.tensor([[10, 10]])
    for floor, expected in [(0.0, [1, 9]), (0.4, [2, 8]), (1.0, [5, 5])]:
        assert Adaptive(floor).pages(scores, caps, 5, 2).tolist() == [expected]
    assert Uniform().pages(scores, caps, 5, 2).tolist() == [[5, 5]]


@pytest.mark.parametrize(
    "sinks, padding, keep, expected",
    [
        (4, 0, 8, [0, 1, 2, 3, 12, 13, 14, 15]),
        (0, 0, 4, [12, 13, 14, 15]),
        (2, 4, 4, [4, 5, 14, 15]),
        (6, 4, 4, [4, 5, 6, 7]),
        (40, 0, 4, [0, 1, 2, 3]),
    ],
)
def test_streaming_llm_keeps_sinks_and_the_most_recent(sinks, padding, keep, expected):
    config = EvictionConfig(policy="streaming-llm", options=dict(sinks=sinks))
    scores = build_policy(config).scorer.scores(bare(16, padding=(padding,)))
    assert select_tokens(scores[None], torch.tensor([[1]]), keep).tolist() == [expected]


def test_streaming_llm_is_exact_for_a_million_tokens():
    scores = StreamingLLM(sinks=4).scores(bare(2**20))
    kept = select_tokens(scores[None], torch.tensor([[1]]), 1000)[0]
    assert kept.tolist() == [0, 1, 2, 3, *range(2**20 - 996, 2**20)]
    assert scores.unique().numel() == 2**20 - 3, "no two recent tokens score alike"


def test_streaming_llm_refuses_what_float32_cannot_tell_apart():
    valid = torch.ones(1, 1, dtype=torch.bool).expand(1, 2**24 + 3)
    candidates = Candidates(torch.empty(1, 0, 1), valid, None, 2, 2**24 + 1, 1.0)
    with pytest.raises(ValueError, match="at most 16777216 tokens"):
        StreamingLLM().scores(candidates)


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("first", [1, 5, 8, 12])
def test_protected_tokens_are_the_first_survivors_of_every_head(name, first):
    """Twice: at a re-eviction the first survivors are the first columns again."""
    policy = build_policy(EvictionConfig(policy=name, budget=64, window=4))
    candidates = random_candidates(padding=(0, 4))
    caps = torch.tensor([[6, 5]])
    for _ in range(2):
        valid = candidates.valid[:, :24]
        scores = protect(policy.scorer.scores(candidates), candidates.valid, first)
        assert torch.isfinite(scores[valid]).all()
        assert torch.equal(scores == float("-inf"), ~valid)
        pages = policy.allocator.pages(scores[None], caps, 3, 4)
        columns = select_tokens(scores[None], pages, 4)[0].split((4 * pages[0]).tolist())
        for head, kept in enumerate(columns):
            begin = int((~valid[head]).sum())
            assert kept[:first].tolist() == list(range(begin, begin + first))
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

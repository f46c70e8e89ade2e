"""Prompts that evict as they stream in: every token equals the oracle's, however they are cut."""

import pytest

from tests.e2e.test_tokens import assert_exact
from tests.models import random_prompt
from tests.nightly import some
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens
from vllm_kvevict.rules.progress import EvictionProgress

SETTINGS = dict(budget=160, interval=64, prefill_interval=128)
POINTS = [288, 416, 544, 672]
"""Of a store of 4 blocks, the window, and 128 tokens."""


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


@pytest.fixture(scope="module")
def oracle_kv4(tiny_model_kv4):
    return MaskedModel(tiny_model_kv4)


def evicted_at(run) -> list[list[int]]:
    return [[eviction.n for eviction in lives[-1].evictions] for lives in run.lives()]


def test_however_the_prompt_is_cut_and_whatever_the_prefix_cache_had(tiny_model, oracle):
    prompts = [random_prompt(n, seed=n) for n in (720, 333, 200, 60)]
    prompts.append(prompts[0][:400] + random_prompt(200, seed=5))
    expected = {0: [*POINTS, 720], 1: [288, 333], 2: [200], 3: [], 4: [*POINTS[:3], 600]}
    seen = []
    for chunk, caching in ((64, False), (512, True), (4096, False)):
        with engine(
            tiny_model,
            dict(policy="ada-snapkv", **SETTINGS, shared_blocks="evict"),
            max_num_batched_tokens=chunk,
            enable_prefix_caching=caching,
        ) as run:
            free = run.free_blocks()
            seen.append(assert_exact(oracle, run, prompts, 40))
            assert dict(enumerate(evicted_at(run))) == expected
            if caching:
                seen.append(assert_exact(oracle, run, prompts, 40))
                assert dict(enumerate(evicted_at(run))) == expected
                assert run.counters.stores_reused > 0 and run.counters.prefix_hits_capped > 0
            assert run.free_blocks() == free
    assert all(tokens == seen[0] for tokens in seen)
    agreed, total = check_tokens(oracle, prompts[0], seen[0][0], [Life(720)])
    assert agreed < total, "the oracle could not tell: full attention agrees"


@pytest.mark.nightly
def test_a_prompt_longer_than_the_pool_beside_others(tiny_model, oracle):
    """Prompts of 1,500 tokens in a pool of 800, preempted and evicted at the same places anew."""
    prompts = [random_prompt(n, seed=n) for n in (1500, 340, 330, 320, 310, 300)]
    with engine(
        tiny_model,
        dict(policy="ada-snapkv", **SETTINGS | dict(interval=256)),
        num_gpu_blocks_override=26,
        max_model_len=4096,
        max_num_batched_tokens=512,
    ) as run:
        preempted = []
        preempt = run.scheduler._preempt_request
        run.scheduler._preempt_request = lambda request, *a, **k: (
            preempted.append(request.request_id),
            preempt(request, *a, **k),
        )
        assert_exact(oracle, run, prompts, 200)
        assert preempted and run.counters.evictions_in_place > 0
        rule = run.worker.kv_eviction.states[0].rule
        for prompt, lives in zip(prompts, run.lives(), strict=True):
            for life in lives:
                request = EvictionProgress(rule, len(prompt), life.prefill_end)
                inside = [e.n for e in life.evictions if e.n < life.prefill_end]
                assert inside == list(request.points)[: len(inside)]
        assert run.free_blocks() == 25


OTHERS = "defensive", "streaming-llm", "h2o", "nacl", "subgen-stream"


@pytest.mark.parametrize("policy", some(OTHERS, "streaming-llm", "h2o"))
def test_other_policies(tiny_model_kv4, oracle_kv4, policy):
    prompts = [random_prompt(n, seed=n) for n in (720, 333)]
    with engine(tiny_model_kv4, dict(policy=policy, **SETTINGS), max_num_batched_tokens=100) as run:
        assert_exact(oracle_kv4, run, prompts, 20)
        assert evicted_at(run) == [[*POINTS, 720], [288, 333]]


def test_layers_with_budgets_of_their_own(tiny_model_kv4, oracle_kv4):
    """Groups that keep more begin at a later point of the others."""
    prompts = [random_prompt(n, seed=n) for n in (900, 500)]
    settings = SETTINGS | dict(policy="pyramidkv", prefill_interval=64, options=dict(groups=2))
    with engine(
        tiny_model_kv4, settings, max_num_batched_tokens=300, num_gpu_blocks_override=80,
        max_model_len=4096,
    ) as run:  # fmt: skip
        assert_exact(oracle_kv4, run, prompts, 40)
        (first, *_), _ = (lives[-1].evictions for lives in run.lives())
        assert any(layer is None for layer in first.positions), "all groups began at once"
        assert run.counters.evictions_prefill > 15

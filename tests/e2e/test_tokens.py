"""Proof 1: every greedy token equals transformers' under the same per-head masks (float32)."""

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens
from vllm_kvevict.config.names import LEARNED, POLICY_NAMES, PYRAMIDS
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.serving.identity import identity

EVICTION = dict(budget=128, interval=64)
LENGTHS = (700, 333, 1200, 1, 60, 150)
NEW_TOKENS = 260  # four evictions in decode at an interval of 64


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


@pytest.fixture(scope="module")
def oracle_kv4(tiny_model_kv4):
    return MaskedModel(tiny_model_kv4)


def assert_exact(oracle, run, prompts, max_tokens, asked=None, near=0.0) -> list[list[int]]:
    """All tokens equal the oracle's, and evictions ran on both sides; returns the tokens."""
    before = run.counters.evictions
    outputs = run.generate(prompts, max_tokens, asked)
    for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
        agreed, total = check_tokens(oracle, prompt, output, lives, near)
        assert agreed == total == len(output)
    assert run.counters.evictions > before
    assert run.worker.kv_eviction.evictions == run.counters.evictions
    return outputs


@pytest.mark.parametrize(
    ("policy", "chunk", "caching"),
    [
        ("ada-snapkv", 64, True),
        nightly("ada-snapkv", 512, False),
        nightly("ada-snapkv", 4096, True),
        nightly("snapkv", 64, False),
        nightly("snapkv", 512, True),
        nightly("snapkv", 4096, False),
        nightly("streaming-llm", 64, True),
        nightly("streaming-llm", 512, True),
        nightly("streaming-llm", 4096, True),
        ("streaming-llm", 4096, False),
    ],
)
def test_tokens_equal_the_oracle(tiny_model, oracle, policy, chunk, caching):
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    with engine(
        tiny_model,
        dict(policy=policy, **EVICTION),
        max_num_batched_tokens=chunk,
        enable_prefix_caching=caching,
    ) as run:
        free = run.free_blocks()
        outputs = assert_exact(oracle, run, prompts, NEW_TOKENS)
        longest = run.lives()[2][-1]
        assert len(longest.evictions) >= 4, "one after prefill and at least three in decode"
        assert run.free_blocks() == free
        if caching:
            hits = []
            look_up = run.scheduler._get_local_prefix_cache_hit
            run.scheduler._get_local_prefix_cache_hit = lambda *given: (
                hits.append(look_up(*given)) or hits[-1]
            )
            assert_exact(oracle, run, prompts, NEW_TOKENS)
            assert sum(num_tokens for _, num_tokens, *_ in hits) > 1000
            assert run.counters.prefix_hits_capped > 0 or policy == "streaming-llm"
        if policy == "ada-snapkv" and not caching:
            for prompt, output in zip(prompts[:2], outputs[:2], strict=True):
                agreed, total = check_tokens(oracle, prompt, output, [Life(len(prompt))])
                assert agreed < total * 0.9, "the oracle could not tell: full attention agrees"


# Learned policies need a profile of the model: test_probe.py has them.
PLAIN = [name for name in POLICY_NAMES if name not in LEARNED]
OTHERS = [n for n in PLAIN if n not in ("ada-snapkv", "snapkv", "streaming-llm")]


@pytest.mark.nightly
@pytest.mark.parametrize("by_depth", [False, True], ids=["layers-alike", "layers-in-groups"])
def test_tokens_of_the_other_policies(tiny_model_kv4, oracle_kv4, by_depth):
    """Chunked prefill, first and later evictions; a second run keeps the same, nacl's too."""
    prompts = [random_prompt(n, seed=n) for n in (700, 333)]
    names = [name for name in OTHERS if (name in PYRAMIDS) == by_depth]
    settings = dict(policy=names[0], budget=160, interval=64, allow=names)
    with engine(tiny_model_kv4, settings, max_num_batched_tokens=128) as run:
        free = run.free_blocks()
        for name in names:
            asked = {"kv_eviction": name}
            if name == "ada-h2o":
                # Sums over all queries differ little between the heads of a random model.
                asked["kv_eviction_budget"] = 288
            assert_exact(oracle_kv4, run, prompts, 150, [asked, asked])
            lives = run.lives()
            assert [len(life[0].evictions) for life in lives] == [3, 3], name
            assert_exact(oracle_kv4, run, prompts, 150, [asked, asked])
            assert run.lives() == lives, name
            assert run.free_blocks() == free
            kept = [layer for life in lives for layer in life[0].evictions[-1].positions]
            assert any(layer[0] != layer[1] for layer in kept) == (name != "tova"), name
            adaptive = any(len({len(head) for head in layer}) > 1 for layer in kept)
            assert adaptive == name.startswith("ada-"), name


def test_every_policy_at_once(tiny_model_kv4, oracle_kv4):
    """Requests under different policies and budgets, and under none, as if each were alone."""
    names = [*PLAIN, "none"]
    prompts = [random_prompt(300 + 20 * i, seed=i) for i in range(len(names))]
    asked = [
        {"kv_eviction": name} | ({"kv_eviction_budget": 96 + 32 * i} if name != "none" else {})
        for i, name in enumerate(names)
    ]
    settings = dict(policy="snapkv", budget=128, interval=32, allow=names)
    with engine(tiny_model_kv4, settings, max_num_batched_tokens=256) as run:
        together = run.generate(prompts, 70, asked)
        lives = run.lives()
        for index, prompt in enumerate(prompts):
            agreed, total = check_tokens(oracle_kv4, prompt, together[index], lives[index])
            assert agreed == total == 70
            assert bool(lives[index][0].evictions) == (names[index] != "none")
            assert run.generate([prompt], 70, [asked[index]]) == [together[index]]
            assert run.lives() == [lives[index]]


def test_budgets_of_heads_differ(tiny_model_kv4, oracle_kv4):
    """ada-snapkv really moves budget between four KV heads, and stays exact."""
    prompts = [random_prompt(1500, seed=3000)]
    with engine(tiny_model_kv4, dict(policy="ada-snapkv", budget=288, interval=64)) as run:
        assert_exact(oracle_kv4, run, prompts, 90)
        kept = run.lives()[0][0].evictions[0].positions
    assert any(len({len(head) for head in layer}) > 1 for layer in kept)


def test_budget_as_a_share_of_the_prompt(tiny_model, oracle):
    prompts = [random_prompt(n, seed=n) for n in (1500, 800, 100)]
    with engine(tiny_model, dict(policy="ada-snapkv", budget="25%", interval=64)) as run:
        assert_exact(oracle, run, prompts, 80)
        first = [lives[0].evictions[0].positions[0] for lives in run.lives()[:2]]
    stores = [sum(map(len, layer)) // len(layer) for layer in first]
    assert stores == [(1500 // 4 - 32) // 32 * 32, (800 // 4 - 32) // 32 * 32]


@pytest.mark.parametrize(
    ("policy", "caching"),
    [
        nightly("ada-snapkv", False),
        ("ada-snapkv", True),
        nightly("streaming-llm", True),
        nightly("nacl", False),
    ],
)
def test_preemption(tiny_model, oracle, policy, caching):
    """A pool too small for the load: requests are preempted, recomputed, evicted anew."""
    prompts = [random_prompt(n, seed=n) for n in (500, 480, 460, 440, 420, 400, 380, 360)]
    with engine(
        tiny_model,
        dict(policy=policy, budget=128, interval=160),
        num_gpu_blocks_override=46,
        max_model_len=1024,
        max_num_batched_tokens=512,
        enable_prefix_caching=caching,
    ) as run:
        preempted = []
        preempt = run.scheduler._preempt_request
        run.scheduler._preempt_request = lambda request, *a, **k: (
            preempted.append(request.request_id),
            preempt(request, *a, **k),
        )
        assert_exact(oracle, run, prompts, 250)
        assert preempted and run.counters.evictions_in_place > 0
        assert any(len(lives) > 1 and lives[-1].evictions for lives in run.lives())
        assert run.free_blocks() == 45


@pytest.mark.parametrize(
    ("policy", "caching"),
    [
        ("ada-snapkv", True),
        *(nightly(*one) for one in (("ada-snapkv", False), ("h2o", False), ("h2o", True))),
    ],
)
def test_a_prompt_that_fills_the_pool(tiny_model, oracle, policy, caching):
    """Survivors go into blocks of the prompt, three times: no block of the pool is free."""
    prompts = [random_prompt(45 * 32 - 100, seed=1), random_prompt(700, seed=2)]
    with engine(
        tiny_model,
        dict(policy=policy, budget=512, interval=32),
        num_gpu_blocks_override=46,
        max_model_len=45 * 32,
        max_num_batched_tokens=256,
        enable_prefix_caching=caching,
    ) as run:
        pool = run.scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(2)
        assert_exact(oracle, run, prompts[:1], 90)
        assert run.counters.evictions_in_place > 0
        assert_exact(oracle, run, prompts[::-1], 90)
        pool.free_blocks(held)
        assert run.free_blocks() == 45


def test_layers_with_budgets_of_their_own(tiny_model_kv4, oracle_kv4):
    """Groups that evict together and apart, preempted in a small pool, with prefix-cache hits."""
    prompts = [random_prompt(n, seed=n) for n in (167, 500, 480, 460, 440, 420, 150)]
    with engine(
        tiny_model_kv4,
        dict(policy="ada-pyramid", budget=128, interval=160, options=dict(beta=8.0)),
        num_gpu_blocks_override=4 * 29 + 1,
        max_model_len=896,
        max_num_batched_tokens=256,
        enable_prefix_caching=True,
    ) as run:
        preempted = []
        preempt = run.scheduler._preempt_request
        run.scheduler._preempt_request = lambda request, *a, **k: (
            preempted.append(request.request_id),
            preempt(request, *a, **k),
        )
        assert_exact(oracle_kv4, run, prompts, 250)
        assert preempted and run.counters.evictions_in_place > 0
        long, short = (run.lives()[index][-1].evictions for index in (1, 0))
        kept = [[len(head) for head in layer] for layer in long[0].positions]
        # 96 tokens beside the window: 180, 124, 68 and 12, or 5.3, 3.7, 2 and at least 1 blocks.
        assert [sum(layer) for layer in kept] == [4 * 32 * blocks for blocks in (5, 4, 2, 1)]
        assert any(len(set(layer)) > 1 for layer in kept)
        evicted = [[layer is not None for layer in each.positions] for each in short]
        assert evicted[0] == [False, True, True, True], "all of it fits the shallowest layer"
        assert [True, False, False, False] in evicted, "which evicts when it has outgrown that"
        hits = []
        look_up = run.scheduler._get_local_prefix_cache_hit
        run.scheduler._get_local_prefix_cache_hit = lambda *given: (
            hits.append(look_up(*given)) or hits[-1]
        )
        for _ in range(2):
            assert_exact(oracle_kv4, run, prompts[:1], 20)
        assert hits[-1][1] == 128, "the window is computed, in every group"
        assert run.free_blocks() == 4 * 29


HEADS = ((2.0, 0.4, 0.8, 0.8), (1.0, 1.0, 1.0, 1.0), (0.1, 0.1, 0.1, 3.7), (0.5, 1.5, 0.5, 1.5))


@pytest.mark.parametrize("policy, heads", [nightly("ada-snapkv", None), nightly("snapkv", HEADS)])
def test_measured_shares_of_layers_that_are_not_neighbours(
    tiny_model_kv4, oracle_kv4, policy, heads
):
    """Two groups of two layers, chunked prefill, preemption, re-eviction, prefix-cache hits."""
    prompts = [random_prompt(n, seed=n) for n in (150, 500, 480, 460, 440, 420, 150 + 17)]
    model = identity(EngineArgs(str(tiny_model_kv4), max_model_len=896).create_engine_config())
    shares = Profile(
        model=model, policy=policy, budget="25%", layers=(0.4, 1.5, 0.5, 1.6), heads=heads
    )
    with engine(
        tiny_model_kv4,
        dict(
            policy=policy,
            budget=128,
            interval=160,
            profile=shares.model_dump(),
            options=dict(groups=2),
        ),
        num_gpu_blocks_override=2 * 29 + 1,
        max_model_len=896,
        max_num_batched_tokens=256,
        enable_prefix_caching=True,
    ) as run:
        groups = {tuple(layers) for layers in run.recorder.layers.values()}
        assert groups == {(1, 3), (0, 2)}
        preempted = []
        preempt = run.scheduler._preempt_request
        run.scheduler._preempt_request = lambda request, *a, **k: (
            preempted.append(request.request_id),
            preempt(request, *a, **k),
        )
        assert_exact(oracle_kv4, run, prompts, 250)
        assert preempted and run.counters.evictions_in_place > 0
        evictions = run.lives()[1][-1].evictions
        assert len(evictions) > 1
        kept = [[len(head) // 32 for head in layer] for layer in evictions[0].positions]
        # 3 blocks a layer on average: 1.35 and 4.65 by share.
        assert [sum(layer) for layer in kept] == [4 * 1, 4 * 5, 4 * 1, 4 * 5]
        if heads:
            # One page at least; 20 pages by shares of 0.5 and 1.5 are 2.5 and 7.5.
            assert kept[0] == [1] * 4 and kept[1] == [5] * 4 and kept[3] == [3, 8, 2, 7]
        else:
            assert any(len(set(layer)) > 1 for layer in kept)
        hits = []
        look_up = run.scheduler._get_local_prefix_cache_hit
        run.scheduler._get_local_prefix_cache_hit = lambda *given: (
            hits.append(look_up(*given)) or hits[-1]
        )
        for _ in range(2):
            assert_exact(oracle_kv4, run, prompts[-1:], 20)
        assert hits[-1][1] == 128, "the window is computed, in every group"
        assert run.free_blocks() == 2 * 29


def test_interval_zero_evicts_after_prefill_only(tiny_model, oracle):
    prompts = [random_prompt(n, seed=n) for n in (700, 100)]
    with engine(tiny_model, dict(policy="snapkv", budget=128, interval=0)) as run:
        assert_exact(oracle, run, prompts, 200)
        assert [len(lives[0].evictions) for lives in run.lives()] == [1, 0]


def test_alone_and_among_forty(tiny_model):
    """Proof 5: batch invariance of the tokens, evictions included."""
    prompt = random_prompt(900, seed=900)
    others = [random_prompt(40 + 17 * i, seed=5000 + i) for i in range(40)]
    options = dict(max_num_batched_tokens=512, max_num_seqs=64)
    with engine(tiny_model, dict(policy="ada-snapkv", **EVICTION), **options) as run:
        alone = run.generate([prompt], 140)[0]
        mine = run.lives()[0]
        crowd = run.generate([*others[:20], prompt, *others[20:]], 140)
        assert crowd[20] == alone
        assert run.lives()[20] == mine
        assert len(mine[0].evictions) >= 3
        assert run.counters.postponed == 0

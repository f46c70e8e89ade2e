"""An FP8 KV cache: greedy tokens equal transformers' over keys and values cut to FP8."""

import pytest
import torch

from tests.e2e.test_sharing import OPTIONS, POINT, PROMPTS
from tests.e2e.test_sharing import SETTINGS as SHARING
from tests.e2e.test_stores import lose
from tests.hardware import FP8_CACHE
from tests.models import cached_tiny_llama, random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens, two_biases, two_biases_fp8
from tests.oracles.packed import BITS, packed

pytestmark = FP8_CACHE

LENGTHS = (700, 333, 150)
NEW_TOKENS = 200

AGREEING = 0.97
"""float32 sums in another order carry a number across a step of FP8 now and then."""


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model, two_biases_fp8)


def share(oracle, prompts, outputs, lives) -> float:
    """Share of tokens that equal the oracle's."""
    pairs = [check_tokens(oracle, *one) for one in zip(prompts, outputs, lives, strict=True)]
    agreed, total = map(sum, zip(*pairs, strict=True))
    assert total == len(prompts) * NEW_TOKENS
    return agreed / total


@pytest.mark.parametrize(
    "policy", ["ada-snapkv", nightly("streaming-llm"), nightly("h2o"), nightly("subgen-stream")]
)
def test_tokens_equal_the_oracle(tiny_model, oracle, policy):
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    settings = dict(policy=policy, budget=128, interval=64)
    options = dict(max_num_batched_tokens=256, kv_cache_dtype="fp8")
    with engine(tiny_model, settings, **options) as run:
        outputs = run.generate(prompts, NEW_TOKENS)
        lives = run.lives()
        assert run.counters.evictions >= 9
        caches = run.worker.kv_eviction._caches.values()
        assert {cache.pages.dtype for cache in caches} == {torch.uint8}
    assert share(oracle, prompts, outputs, lives) > AGREEING
    full = [[Life(len(prompt))] for prompt in prompts]
    assert share(oracle, prompts, outputs, full) < 0.5
    assert share(MaskedModel(tiny_model, two_biases), prompts, outputs, lives) < 0.9


@pytest.fixture(scope="module")
def wide_model():
    """The tiny model with heads of 64 dimensions."""
    return cached_tiny_llama(kv_heads=2, heads=4, head_dim=64)


@pytest.mark.parametrize(
    "policy", ["ada-snapkv", nightly("streaming-llm"), nightly("h2o"), nightly("ada-defensive")]
)
def test_stores_in_four_bits(wide_model, policy):
    """Survivors are cut to FP8 when they are computed, and to four bits when they are kept."""
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    settings = dict(policy=policy, budget=160, interval=64, store_dtype="int4")
    options = dict(max_num_batched_tokens=256, kv_cache_dtype="fp8")
    with engine(wide_model, settings, **options) as run:
        outputs = run.generate(prompts, NEW_TOKENS)
        lives = run.lives()
        assert run.counters.evictions >= 9
        (pages,) = {cache.page_tokens for cache in run.worker.kv_eviction._caches.values()}
        assert pages == 60, "a page of FP8 with 32 tokens"
    stored = packed(*BITS["int4"])
    oracle = MaskedModel(wide_model, two_biases_fp8, stored)
    assert share(oracle, prompts, outputs, lives) > AGREEING
    assert share(MaskedModel(wide_model, two_biases_fp8), prompts, outputs, lives) < 0.95
    assert share(MaskedModel(wide_model, two_biases, stored), prompts, outputs, lives) < 0.9


@pytest.mark.parametrize("tier", ["memory", nightly("file")])
def test_a_store_in_four_bits_comes_back_as_it_was(wide_model, tmp_path, tier):
    """Also its tail, in FP8."""
    settings = SHARING | dict(budget=400, store_dtype="int4")
    settings |= dict(store_memory="1G") if tier == "memory" else dict(store_path=str(tmp_path))
    options = OPTIONS | dict(enable_prefix_caching=True, kv_cache_dtype="fp8")
    asked = [POINT] * len(PROMPTS)
    with engine(wide_model, settings, **options) as run:
        expected = run.generate(PROMPTS, 64, asked)
        assert run.counters.stores_published == run.counters.stores_saved == 1
        lose(run)
        assert run.generate(PROMPTS, 64, asked) == expected
        found = run.counters
        assert found.stores_restored_memory + found.stores_restored_file == 1

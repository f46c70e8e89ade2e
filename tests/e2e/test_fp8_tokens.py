"""An FP8 KV cache: greedy tokens equal transformers' over keys and values cut to FP8."""

import pytest
import torch

from tests.hardware import FP8_CACHE
from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens, two_biases, two_biases_fp8

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

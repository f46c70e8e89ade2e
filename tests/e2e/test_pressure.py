"""Eviction under pressure only: tokens are the oracle's over what each request kept."""

from tests.e2e.test_tokens import assert_exact
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens

POLICIES = ("ada-snapkv", "streaming-llm", "ada-defensive", "tova")
PROMPTS = [random_prompt(n, seed=n) for n in (500, 333, 460, 150, 420, 281)]


def test_a_pool_too_small_for_all(tiny_model):
    """Nobody is evicted alone; of six, those that must be, in prefill and in decode."""
    oracle = MaskedModel(tiny_model)
    settings = dict(policy=POLICIES[0], allow=POLICIES, budget=96, interval=32, when="pressure")
    asked = [{"kv_eviction": POLICIES[i % len(POLICIES)]} for i in range(len(PROMPTS))]
    with engine(
        tiny_model,
        settings,
        num_gpu_blocks_override=46,
        max_model_len=1024,
        max_num_batched_tokens=256,
        enable_prefix_caching=True,
    ) as run:
        free = run.free_blocks()
        (alone,) = run.generate(PROMPTS[:1], 150, asked[:1])
        assert check_tokens(oracle, PROMPTS[0], alone, [Life(len(PROMPTS[0]))]) == (150, 150)
        assert run.counters.evictions == 0
        outputs = assert_exact(oracle, run, PROMPTS, 150, asked)
        assert run.counters.evictions_pressure == run.counters.evictions >= len(PROMPTS)
        assert run.counters.evictions_decode > 0
        full = sum(
            check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
            for prompt, output in zip(PROMPTS, outputs, strict=True)
        )
        assert full < 0.9 * 150 * len(PROMPTS), "the oracle could not tell: full attention agrees"
        assert run.free_blocks() == free

"""Tokens that stand for others: greedy tokens equal the oracle's under the recorded weights."""

import pytest

from tests.e2e.test_own_settings import asks
from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.oracles.masked import Kept, Life, MaskedModel, check_tokens

SERVER = dict(policy="subgen-stream", budget=128, interval=32, allow="snapkv,none")
NEW_TOKENS = 100
CASES = [
    # prompt tokens, settings, lengths at which it evicts
    (500, {}, [500, 532, 564, 596]),
    (560, asks(at=-60), [500, 560, 592, 624, 656]),
    (400, asks(protect_first=70, interval=64), [400, 464]),
    (300, asks(budget="50%", interval=0), [300]),
    (450, asks("snapkv"), [450, 482, 514, 546]),
    (200, asks("none"), []),
]
PROMPTS = [random_prompt(length, seed=100 + i) for i, (length, _, _) in enumerate(CASES)]
ASKED = [asked for _, asked, _ in CASES]


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


def unweighted(life: Life) -> Life:
    kept = [Kept(k.n, k.tail_start, k.positions) for k in life.evictions]
    return Life(life.prefill_end, kept)


@pytest.mark.parametrize(
    "settings", [nightly({}), dict(options=dict(radius=2.0, cluster_samples=1, value_share=0.6))]
)
def test_a_mixed_batch_equals_the_oracle(tiny_model, oracle, settings):
    """Chunked prefill, eviction points, protected tokens, prefix hits, other policies beside."""
    options = dict(max_num_batched_tokens=96, enable_prefix_caching=True)
    with engine(tiny_model, SERVER | settings, **options) as run:
        free = run.free_blocks()
        outputs = run.generate(PROMPTS, NEW_TOKENS, ASKED)
        lives = run.lives()
        plain = 0
        for prompt, output, mine, case in zip(PROMPTS, outputs, lives, CASES, strict=True):
            assert [eviction.n for eviction in mine[0].evictions] == case[2]
            assert check_tokens(oracle, prompt, output, mine) == (NEW_TOKENS, NEW_TOKENS), case
            plain += check_tokens(oracle, prompt, output, [unweighted(mine[0])])[0]
        assert plain < 0.9 * NEW_TOKENS * len(CASES), "weights changed nothing"
        weighted = [
            mine[0].evictions[-1].weights is not None for mine in lives if mine[0].evictions
        ]
        assert weighted == [True] * 4 + [False]
        first = lives[2][0].evictions[-1]
        assert all(head[:70] == list(range(70)) for layer in first.positions for head in layer)
        assert all(head[:70] == [[0.0, 0.0]] * 70 for layer in first.weights for head in layer)
        assert run.generate(PROMPTS, NEW_TOKENS, ASKED) == outputs, "with prefix hits"
        assert run.lives() == lives
        assert run.generate(PROMPTS[4:], NEW_TOKENS, ASKED[4:]) == outputs[4:]
        assert run.free_blocks() == free
        assert run.worker.kv_eviction.evictions == run.counters.evictions == 2 * 16 + 4


@pytest.mark.nightly
def test_a_preempted_request_starts_a_new_stream(tiny_model, oracle):
    prompts = [random_prompt(n, seed=n) for n in (500, 480, 460, 440, 420, 400, 380, 360)]
    options = dict(num_gpu_blocks_override=46, max_model_len=1024, max_num_batched_tokens=512)
    with engine(tiny_model, SERVER | dict(interval=160), **options) as run:
        outputs = run.generate(prompts, 250)
        lives = run.lives()
        assert any(len(mine) > 1 and mine[-1].evictions for mine in lives), "nobody was preempted"
        for prompt, output, mine in zip(prompts, outputs, lives, strict=True):
            assert check_tokens(oracle, prompt, output, mine) == (250, 250)
        assert run.free_blocks() == 45
        assert len(run.worker.kv_eviction.policies["subgen-stream"].scorer.state) <= len(prompts)

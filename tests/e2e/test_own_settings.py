"""Requests with their own settings: every token equals the oracle's, alone and in one batch."""

from typing import Any

import pytest
from vllm import SamplingParams

from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import Life, MaskedModel, check_tokens

SERVER = dict(policy="snapkv", budget=128, interval=64, allow="ada-snapkv,streaming-llm,none")
NEW_TOKENS = 150


def asks(policy: str | None = None, **settings: Any) -> dict[str, Any]:
    given = {f"kv_eviction_{name}": value for name, value in settings.items()}
    return given if policy is None else given | {"kv_eviction": policy}


CASES: list[tuple[int, dict[str, Any], list[int]]] = [
    # prompt tokens, settings, lengths at which it evicts
    (700, asks(at=500), [500, 700, 764, 828]),
    (540, asks(at="-40", interval=0), [500]),
    (700, asks("streaming-llm", at=-100, budget="25%"), [600, 700, 764, 828]),
    (640, asks("ada-snapkv", at=600, budget=224), [600, 664, 728]),
    (900, asks("ada-snapkv", budget="40%", interval=32), [900, 932, 996, 1028]),
    (400, asks("none"), []),
    (600, asks(budget=200, interval=0), [600]),
    (650, asks("ada-snapkv", protect_first=64, budget=320), [650, 714, 778]),
    (333, asks("streaming-llm", protect_first=96), [333, 397, 461]),
    # More than the budget holds: the store grows, and a short prompt stays whole.
    (700, asks("ada-snapkv", protect_first=300), [700, 764, 828]),
    (300, asks(protect_first=250, interval=0), []),
    (300, asks(at=20), [301, 365, 429]),
    (500, {}, [500, 564, 628]),
]
PROMPTS = [random_prompt(length, seed=7000 + i) for i, (length, _, _) in enumerate(CASES)]
ASKED = [asked for _, asked, _ in CASES]


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


def assert_exact(oracle, run) -> list[list[int]]:
    """All cases at once equal the oracle, and evict when they should."""
    before = run.counters.evictions + run.counters.stores_reused
    outputs = run.generate(PROMPTS, NEW_TOKENS, ASKED)
    evicted = 0
    for prompt, output, lives, case in zip(PROMPTS, outputs, run.lives(), CASES, strict=True):
        assert [eviction.n for eviction in lives[0].evictions] == case[2], case
        assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS), case
        evicted += len(case[2])
    assert run.counters.evictions + run.counters.stores_reused - before == evicted
    assert run.counters.postponed == 0
    return outputs


CELLS = [(64, True)]
MORE = [(64, False), (512, False), (512, True), (8192, False), (8192, True)]


@pytest.mark.parametrize(
    ("chunk", "caching"),
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in MORE)],
)
def test_a_mixed_batch_equals_the_oracle(tiny_model, oracle, chunk, caching):
    options = dict(max_num_batched_tokens=chunk, enable_prefix_caching=caching)
    # Else a step carries a bounded number of decode evictions.
    with engine(tiny_model, SERVER | dict(shared_blocks="evict"), **options) as run:
        free = run.free_blocks()
        assert_exact(oracle, run)
        assert run.free_blocks() == free
        if caching:
            assert_exact(oracle, run)
            assert run.counters.prefix_hits_capped > 0
            assert run.counters.stores_reused == 4


@pytest.mark.nightly
def test_each_alone_says_the_same(tiny_model):
    with engine(tiny_model, SERVER, max_num_batched_tokens=512) as run:
        together = run.generate(PROMPTS, NEW_TOKENS, ASKED)
        lives = run.lives()
        for index, (prompt, asked) in enumerate(zip(PROMPTS, ASKED, strict=True)):
            assert run.generate([prompt], NEW_TOKENS, [asked])[0] == together[index]
            assert run.lives()[0] == lives[index]
        assert run.counters.evictions > 50 and run.counters.postponed == 0


def test_what_comes_after_the_point_sees_the_evicted_cache(tiny_model, oracle):
    """The very first token already does: full attention says something else."""
    prompts = [random_prompt(600, seed=8000 + i) for i in range(12)]
    with engine(tiny_model, SERVER | dict(budget=64)) as run:
        outputs = run.generate(prompts, 1, [asks(at=560, interval=0)] * len(prompts))
        assert run.counters.evictions == len(prompts) == run.counters.evictions_prefill
        lives = run.lives()
    agreed = 0
    for prompt, output, mine in zip(prompts, outputs, lives, strict=True):
        assert check_tokens(oracle, prompt, output, mine) == (1, 1)
        agreed += check_tokens(oracle, prompt, output, [Life(len(prompt))])[0]
    assert agreed < len(prompts)


def test_protected_tokens_stay_in_every_head(tiny_model_kv4):
    prompt, more = random_prompt(700, seed=9), 300
    cases = [
        (policy, protect)
        for policy in ("ada-snapkv", "snapkv", "streaming-llm")
        for protect in (0, 70, more)
    ]
    asked = [asks(policy, protect_first=protect) for policy, protect in cases]
    with engine(tiny_model_kv4, SERVER | dict(shared_blocks="evict")) as run:
        run.generate([prompt] * len(cases), NEW_TOKENS, asked)
        for (_, protect), (life,) in zip(cases, run.lives(), strict=True):
            first = protect or more
            assert len(life.evictions) == 3
            kept = [
                head[:first] == list(range(first))
                for eviction in life.evictions
                for layer in eviction.positions
                for head in layer
            ]
            assert all(kept) if protect else not any(kept)


@pytest.mark.nightly
def test_a_preempted_request_evicts_at_its_point_again(tiny_model, oracle):
    """A pool too small for the load, and every request has a point and settings of its own."""
    prompts = [random_prompt(n, seed=n) for n in (500, 480, 460, 440, 420, 400, 380, 360)]
    policies = ["snapkv", "streaming-llm", "ada-snapkv", "snapkv"] * 2
    asked = [asks(policy, at=300 + 5 * i, interval=0) for i, policy in enumerate(policies)]
    options = dict(num_gpu_blocks_override=46, max_model_len=1024, max_num_batched_tokens=512)
    with engine(tiny_model, SERVER, enable_prefix_caching=True, **options) as run:
        outputs = run.generate(prompts, 250, asked)
        lives = run.lives()
        assert run.free_blocks() == 45
    assert any(len(mine) > 1 and mine[-1].evictions for mine in lives), "nobody was preempted"
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for life in lives[index]:
            assert [eviction.n for eviction in life.evictions] in ([], [300 + 5 * index])
        agreed, total = check_tokens(oracle, prompt, output, lives[index])
        assert agreed == total == 250


def test_bad_settings_raise_value_error_and_disturb_nobody(tiny_model):
    good = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with engine(tiny_model, SERVER) as run:
        alone = run.generate([PROMPTS[0]], 20)[0]
        bad = good.clone()
        bad.extra_args = asks(at=701)
        with pytest.raises(ValueError, match="kv_eviction_at must be between 1 and the prompt's"):
            run.llm.generate([dict(prompt_token_ids=PROMPTS[0])] * 2, [good, bad], use_tqdm=False)
        assert not run.scheduler.requests
        assert run.generate([PROMPTS[0]], 20)[0] == alone

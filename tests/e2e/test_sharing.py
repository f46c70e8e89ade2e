"""Requests that take the store of another one say what they say when they evict for themselves."""

import pytest
import torch

from tests.hardware import FP8_CACHE
from tests.models import random_prompt
from tests.nightly import nightly, some
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens

DOCUMENT = random_prompt(500, seed=1)
PROMPTS = [DOCUMENT + random_prompt(20 + 13 * i, seed=10 + i) for i in range(5)]
POINT = {"kv_eviction_at": len(DOCUMENT)}
NEW_TOKENS = 100
SETTINGS = dict(policy="ada-snapkv", budget=128, interval=64, shared_blocks="evict")
OPTIONS = dict(max_num_batched_tokens=256, max_model_len=1024)

CASES = {
    "ada-snapkv": {},
    "defensive": dict(policy="ada-defensive"),
    "two groups": dict(policy="ada-pyramid", budget=160),
    "whole blocks": dict(at=480),
    "evicts once": dict(interval=0),
}


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


@pytest.mark.parametrize("case", some(CASES, "ada-snapkv"))
def test_tokens_equal_those_of_requests_that_evict_for_themselves(tiny_model, oracle, case):
    settings = SETTINGS | CASES[case]
    asked = [{"kv_eviction_at": settings.pop("at", len(DOCUMENT))}] * len(PROMPTS)
    with engine(tiny_model, settings, **OPTIONS) as alone:
        expected = alone.generate(PROMPTS, NEW_TOKENS, asked)
        assert alone.counters.stores_reused == 0
        assert alone.counters.evictions_prefill >= len(PROMPTS)
    with engine(tiny_model, settings, enable_prefix_caching=True, **OPTIONS) as run:
        free = run.free_blocks()
        for _ in range(2):  # the second time the store is idle before
            before = run.counters.stores_reused
            assert run.generate(PROMPTS, NEW_TOKENS, asked) == expected
            taken = run.counters.stores_reused - before
            for prompt, output, lives in zip(PROMPTS, expected, run.lives(), strict=True):
                assert lives[0].evictions[0].n == asked[0]["kv_eviction_at"]
                same, total = check_tokens(oracle, prompt, output, lives)
                assert same == total == NEW_TOKENS
        assert taken == len(PROMPTS) and run.counters.stores_reused == 2 * taken - 1
        assert run.counters.stores_published == 1
        assert bool(run.counters.evictions_decode) == (settings["interval"] > 0)
        assert run.free_blocks() == free


def test_answers_do_not_depend_on_how_many_are_asked_at_once(tiny_model, oracle):
    """Under the default, which gives up evictions of blocks that others hold.

    All questions are as long, so that more are due in one step than it may evict.
    """
    settings = SETTINGS | dict(shared_blocks="keep")
    asked = [DOCUMENT + random_prompt(25, seed=seed) for seed in range(20, 26)]
    with engine(tiny_model, settings, enable_prefix_caching=True, **OPTIONS) as run:
        alone = [run.generate([prompt], 200, [POINT])[0] for prompt in asked]
        assert run.counters.evictions_decode > 0
        before = run.counters.stores_reused, run.counters.evictions_decode
        assert run.generate(asked, 200, [POINT] * 6) == alone
        assert run.counters.stores_reused - before[0] == 6
        assert run.counters.evictions_decode == 2 * before[1]
        assert run.counters.postponed == 0
        for prompt, output, lives in zip(asked, alone, run.lives(), strict=True):
            assert check_tokens(oracle, prompt, output, lives) == (200, 200)


@pytest.mark.parametrize("sharing", [False, True], ids=["alone", "sharing"])
def test_what_lies_before_the_point_is_not_computed(tiny_model, sharing):
    """Of the document, only the copy of the last block and the tail are read, and never written."""
    with engine(tiny_model, SETTINGS, enable_prefix_caching=True, **OPTIONS) as run:
        run.generate(PROMPTS[:1], 1, [POINT])
        run.scheduler.kv_cache_manager.block_pool.evict_blocks(
            {
                block.block_id
                for block in run.scheduler.kv_cache_manager.block_pool.blocks
                if block.block_hash is not None and block not in held(run)
            }
        )
        if not sharing:
            assert run.llm.reset_prefix_cache()
        computed: list[int] = []
        schedule = run.scheduler.schedule

        def scheduled(*args, **kwargs):
            output = schedule(*args, **kwargs)
            computed.append(output.total_num_scheduled_tokens)
            return output

        run.scheduler.schedule = scheduled
        run.generate(PROMPTS[1:2], 1, [POINT])
        question = len(PROMPTS[1]) - len(DOCUMENT)
        assert sum(computed) == (question if sharing else len(PROMPTS[1]))


@pytest.mark.parametrize("interval", [nightly(0), 64])
def test_a_turn_takes_what_the_one_before_computed(tiny_model, oracle, interval):
    settings, turns = SETTINGS | dict(interval=interval), [PROMPTS[0]]
    with engine(tiny_model, settings, enable_prefix_caching=True, **OPTIONS) as run:
        for seed in range(3):
            before = run.counters.tokens_reused
            (answer,) = run.generate(turns[-1:], NEW_TOKENS, [POINT])
            assert check_tokens(oracle, turns[-1], answer, run.lives()[0]) == (100, 100)
            # The answer's last token was sampled only; the window is that of the next eviction.
            former = len(turns[-2]) + NEW_TOKENS - 1 if seed else 0
            most = former // 32 * 32 if not interval else len(turns[-1]) - 32
            taken = run.counters.tokens_reused - before
            assert not seed or len(DOCUMENT) < taken <= most
            assert interval or taken == most
            turns.append(turns[-1] + answer + random_prompt(20, seed=50 + seed))
        assert run.counters.stores_published == 1 and run.counters.stores_reused == 2
        assert bool(run.counters.evictions_decode) == bool(interval)


def held(run):
    """Blocks of published stores, and those behind them."""
    stores = run.scheduler._stores._published.values()
    return [block for store in stores for block, _ in store.hashes]


@pytest.mark.nightly
@FP8_CACHE
def test_an_fp8_cache_is_shared_as_it_is(tiny_model):
    options = OPTIONS | dict(kv_cache_dtype="fp8")
    asked = [POINT] * len(PROMPTS)
    with engine(tiny_model, SETTINGS, **options) as alone:
        expected = alone.generate(PROMPTS, NEW_TOKENS, asked)
    with engine(tiny_model, SETTINGS, enable_prefix_caching=True, **options) as run:
        outputs = run.generate(PROMPTS, NEW_TOKENS, asked)
        assert run.counters.stores_reused == len(PROMPTS) - 1
    same = torch.tensor(outputs) == torch.tensor(expected)
    # Sums in another order carry a number across a step of FP8 now and then.
    assert same.float().mean() > 0.9 and outputs[0] == expected[0]


def test_preempted_requests_take_the_store_again(tiny_model, oracle):
    """A pool too small for all of them; what they replay sees the same store."""
    asked = [POINT | {"kv_eviction_interval": 0}] * len(PROMPTS)
    options = OPTIONS | dict(num_gpu_blocks_override=29, max_model_len=832)
    with engine(tiny_model, SETTINGS, enable_prefix_caching=True, **options) as run:
        outputs = run.generate(PROMPTS, 200, asked)
        lives = run.lives()
        assert run.free_blocks() == 28
        assert run.counters.stores_reused > len(PROMPTS) - 1
    assert any(len(mine) > 1 and mine[-1].evictions for mine in lives), "nobody was preempted"
    for prompt, output, mine in zip(PROMPTS, outputs, lives, strict=True):
        assert check_tokens(oracle, prompt, output, mine) == (200, 200)

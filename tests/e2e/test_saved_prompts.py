"""A connector that saves prompts by their tokens never gets what an eviction has touched."""

import pytest
from vllm.config import KVTransferConfig

from tests.e2e.test_stores import computed, lose
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens
from vllm_kvevict.engine.remote_prefill import RemotePrefill

# ExampleConnector saves a prompt in its first step, so prompts are not computed in parts.
OPTIONS = dict(max_num_batched_tokens=1024, max_model_len=1024, enable_prefix_caching=True)
SETTINGS = dict(policy="ada-snapkv", budget=128, interval=32, allow="none")
PROMPTS = [random_prompt(300 + 37 * i, seed=80 + i) for i in range(3)]
NEW_TOKENS = 60
NEVER = [{"kv_eviction": "none"}] * 3
POINT = {"kv_eviction_at": 200}


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


def saving(folder):
    transfer = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config=dict(shared_storage_path=str(folder)),
    )
    return OPTIONS | dict(kv_transfer_config=transfer)


def saved(folder):
    return {path.name for path in folder.iterdir()}


def check(run, oracle, texts, outputs):
    for text, output, lives in zip(texts, outputs, run.lives(), strict=True):
        assert check_tokens(oracle, text, output, lives) == (len(output), len(output))


def test_prompts_are_saved_whole_and_loaded_before_their_window(tiny_model, oracle, tmp_path):
    with engine(tiny_model, SETTINGS, **saving(tmp_path)) as run:
        free = run.free_blocks()
        first = run.generate(PROMPTS, NEW_TOKENS)
        check(run, oracle, PROMPTS, first)
        assert run.counters.evictions_decode, "answers go on after evictions"
        assert len(saved(tmp_path)) == 3
        lose(run)
        counts = computed(run)
        again = run.generate(PROMPTS, NEW_TOKENS)
        check(run, oracle, PROMPTS, again)
        assert [lives[0].evictions[0].n for lives in run.lives()] == list(map(len, PROMPTS))
        assert sum(counts) <= 3 * (NEW_TOKENS - 1 + 64), "prompts were loaded"
        assert run.free_blocks() == free
    # Requests that never evict read what was saved as their own.
    with engine(tiny_model, SETTINGS, **OPTIONS) as alone:
        expected = alone.generate(PROMPTS, NEW_TOKENS, NEVER)
    with engine(tiny_model, SETTINGS, **saving(tmp_path)) as run:
        counts = computed(run)
        assert run.generate(PROMPTS, NEW_TOKENS, NEVER) == expected
        assert sum(counts) <= 3 * (NEW_TOKENS - 1 + 64)


def test_nothing_is_saved_that_depends_on_an_eviction(tiny_model, oracle, tmp_path):
    """Neither tokens after a point nor requests that start with a store."""
    document = PROMPTS[0][:200]
    texts = [document + random_prompt(60 + 40 * i, seed=90 + i) for i in range(3)]
    with engine(tiny_model, SETTINGS, **saving(tmp_path)) as run:
        check(run, oracle, texts[:1], run.generate(texts[:1], NEW_TOKENS, [POINT]))
        check(run, oracle, texts[1:], run.generate(texts[1:], NEW_TOKENS, [POINT] * 2))
        assert run.counters.stores_reused == 2
        assert not saved(tmp_path)
        # Without a point the same prompts are saved.
        lose(run)
        check(run, oracle, texts, run.generate(texts, NEW_TOKENS))
        assert len(saved(tmp_path)) == 3
        lose(run)
        check(run, oracle, texts, run.generate(texts, NEW_TOKENS, [POINT] * 3))
        assert len(saved(tmp_path)) == 3


@pytest.mark.nightly
def test_each_part_is_needed(tiny_model, oracle, tmp_path, monkeypatch):
    monkeypatch.setattr(RemotePrefill, "visible", lambda self, output: output)
    with pytest.raises((AssertionError, RuntimeError)):
        test_nothing_is_saved_that_depends_on_an_eviction(tiny_model, oracle, tmp_path)

"""Turns of a conversation that continue from what earlier turns kept say what they would have said
on an empty server."""

import pytest

from tests.e2e.test_stores import computed, lose
from tests.models import random_prompt
from tests.nightly import some
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens

BLOCK, WINDOW, EVERY, ANSWER, QUESTION = 32, 32, 96, 50, 30
SETTINGS = dict(policy="ada-snapkv", budget="25%,min=40", every=EVERY)
OPTIONS = dict(max_num_batched_tokens=256, max_model_len=1024, enable_prefix_caching=True)

CASES = {
    "ada-snapkv": {},
    "tokens": dict(budget=128),
    "defensive": dict(policy="ada-defensive"),
    "streaming-llm": dict(policy="streaming-llm"),
    "two groups": dict(policy="ada-pyramid", budget=160),
}


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


def turns(run, count, before=lambda: None, start=()):
    """A conversation: each prompt with its answer."""
    said, asked = list(start), []
    for turn in range(count):
        prompt = said + random_prompt(300 if not said else QUESTION, seed=100 + turn)
        before()
        (answer,) = run.generate([prompt], ANSWER)
        asked.append((prompt, answer, run.lives()[0]))
        said = prompt + answer
    return asked


@pytest.mark.parametrize("case", some(CASES, "two groups"))
def test_a_turn_says_what_it_says_on_an_empty_server(tiny_model, oracle, case):
    with engine(tiny_model, SETTINGS | CASES[case], **OPTIONS) as run:
        free, counts = run.free_blocks(), computed(run)
        found = turns(run, 6)
        assert run.counters.evictions_decode >= 3 and run.counters.stores_reused == 5
        # The window of an eviction is computed anew, and blocks are reused as a whole.
        most = 6 * (QUESTION + ANSWER + WINDOW + 2 * BLOCK) + 300
        assert sum(counts) <= most < len(found[-1][0]) * 3
        for prompt, answer, lives in found[3:]:
            assert check_tokens(oracle, prompt, answer, lives) == (ANSWER, ANSWER)
        reused = run.counters.stores_reused
        empty = turns(run, 6, before=lambda: run.llm.reset_prefix_cache())
        assert run.counters.stores_reused == reused
        assert [answer for _, answer, _ in empty] == [answer for _, answer, _ in found]
        assert run.free_blocks() == free


@pytest.mark.nightly
def test_branches_of_one_conversation_do_not_mix(tiny_model, oracle):
    with engine(tiny_model, SETTINGS, **OPTIONS) as run:
        said = turns(run, 3)[-1]
        prompts = [[*said[0], *said[1], *random_prompt(90, seed=seed)] for seed in range(200, 204)]
        together = run.generate(prompts, ANSWER)
        for prompt, answer, lives in zip(prompts, together, run.lives(), strict=True):
            assert check_tokens(oracle, prompt, answer, lives[-1:]) == (ANSWER, ANSWER)
        assert run.counters.stores_reused >= 2 + len(prompts)
        alone = []
        for prompt in prompts:
            lose(run)
            assert run.llm.reset_prefix_cache()
            alone += run.generate([prompt], ANSWER)
        assert together == alone


@pytest.mark.nightly
def test_a_conversation_that_the_kv_cache_lost_comes_back(tiny_model, oracle):
    settings = SETTINGS | dict(store_memory="1G")
    with engine(tiny_model, settings, **OPTIONS) as run:
        counts = computed(run)
        found = turns(run, 5, before=lambda: lose(run))
        assert run.counters.stores_restored_memory == 4
        assert run.counters.stores_saved <= 5 < run.counters.stores_published
        # After a pause, what came after the last store is computed anew.
        assert sum(counts) <= 300 + 5 * (QUESTION + ANSWER + EVERY + WINDOW + 2 * BLOCK)
        for prompt, answer, lives in found:
            assert check_tokens(oracle, prompt, answer, lives) == (ANSWER, ANSWER)


@pytest.mark.parametrize("case", some(CASES, "ada-snapkv"))
def test_a_restart_in_the_middle_of_a_conversation(tiny_model, oracle, tmp_path, case):
    settings = SETTINGS | CASES[case] | dict(store_path=str(tmp_path))
    with engine(tiny_model, settings, **OPTIONS) as first:
        prompt, answer, _ = turns(first, 3)[-1]
        # A server takes this step by itself.
        first.core.step()
        first.worker.kv_eviction.stores.tiers.flush()
        kept = first.recorder.saved
    with engine(tiny_model, settings, **OPTIONS) as run:
        run.recorder.saved.update(kept)
        counts = computed(run)
        said = prompt + answer
        for prompt, answer, lives in turns(run, 2, start=said):
            assert check_tokens(oracle, prompt, answer, lives) == (ANSWER, ANSWER)
        assert (run.counters.stores_restored_file, run.counters.stores_reused) == (1, 2)
        assert sum(counts) <= 2 * (QUESTION + ANSWER + EVERY + WINDOW + 2 * BLOCK)

"""Turns of a conversation that continue from what earlier turns kept say what they would have said
on an empty server."""

import pytest

from tests.e2e.test_stores import computed, lose
from tests.models import random_prompt
from tests.nightly import some
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens

BLOCK, WINDOW, EVERY, ANSWER, QUESTION = 32, 32, 96, 50, 30
SETTINGS = dict(policy="ada-snapkv", budget="25%", every=EVERY)
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


@pytest.mark.parametrize("case", some(CASES, "ada-snapkv", "two groups"))
def test_a_turn_says_what_it_says_on_an_empty_server(tiny_model, oracle, case):
    with engine(tiny_model, SETTINGS | CASES[case], **OPTIONS) as run:
        free, counts = run.free_blocks(), computed(run)
        found = turns(run, 6)
        assert run.counters.evictions_decode >= 3 and run.counters.stores_reused == 5
        # The window of an eviction is computed anew, and blocks are reused as a whole.
        most = 6 * (QUESTION + ANSWER + WINDOW + 2 * BLOCK) + 300
        assert sum(counts) <= most < len(found[-1][0]) * 3
        for prompt, answer, lives in found:
            assert check_tokens(oracle, prompt, answer, lives) == (ANSWER, ANSWER)
        reused = run.counters.stores_reused
        empty = turns(run, 6, before=lambda: run.llm.reset_prefix_cache())
        assert run.counters.stores_reused == reused
        assert [answer for _, answer, _ in empty] == [answer for _, answer, _ in found]
        assert run.free_blocks() == free


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

"""Requests that take a store of a model with sliding windows or chunks say what they say alone."""

import pytest

from tests.e2e.architectures import MaskedArchitecture, architecture
from tests.e2e.test_conversations import turns
from tests.e2e.test_sharing import DOCUMENT, NEW_TOKENS, OPTIONS, POINT, PROMPTS, SETTINGS
from tests.e2e.test_stores import computed, lose
from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.oracles.masked import check_tokens

EVERY = dict(policy="ada-snapkv", budget="25%,min=40", every=96)
CACHING = OPTIONS | dict(enable_prefix_caching=True)
CASES = {
    "Gemma3Text": {},
    "pyramid": dict(policy="ada-pyramid", budget=160),
    "streaming-llm": dict(policy="streaming-llm"),
}
OTHERS = ["GptOss", "Llama4Text", "Cohere2"]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return architecture("Gemma3Text", tmp_path_factory.mktemp("gemma"))


def shares(path, settings, oracle) -> None:
    """Questions about one document, twice: alone, and from one store."""
    asked = [POINT] * len(PROMPTS)
    with engine(path, settings, **OPTIONS) as alone:
        expected = alone.generate(PROMPTS, NEW_TOKENS, asked)
        assert alone.counters.stores_reused == 0
        assert alone.counters.evictions_prefill >= len(PROMPTS)
    with engine(path, settings, **CACHING) as run:
        free = run.free_blocks()
        for _ in range(2):  # The second time the store is idle before.
            before = run.counters.stores_reused
            assert run.generate(PROMPTS, NEW_TOKENS, asked) == expected
            taken = run.counters.stores_reused - before
            for prompt, output, lives in zip(PROMPTS, expected, run.lives(), strict=True):
                assert lives[0].evictions[0].n == len(DOCUMENT)
                if oracle is not None:
                    assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS)
        assert taken == len(PROMPTS) and run.counters.stores_reused == 2 * taken - 1
        assert run.counters.stores_published == 1
        assert run.free_blocks() == free


@pytest.mark.parametrize("case", ["Gemma3Text", *map(nightly, list(CASES)[1:])])
def test_questions_about_one_document(gemma, case):
    shares(gemma, SETTINGS | CASES[case], MaskedArchitecture(gemma))


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name, tmp_path):
    path = architecture(name, tmp_path)
    shares(path, SETTINGS, MaskedArchitecture(path))


@pytest.mark.nightly
@pytest.mark.parametrize("stored", ["int4", "int8"])
def test_stores_in_few_bits(tmp_path, stored):
    path = architecture("Gemma3Text", tmp_path, head_dim=64)
    shares(path, SETTINGS | dict(budget=280, store_dtype=stored), None)


def test_what_lies_before_the_point_is_not_computed(gemma):
    """Not even what its windows reach, after they have moved on."""
    with engine(gemma, SETTINGS | dict(interval=0), **CACHING) as run:
        run.generate(PROMPTS[:1], NEW_TOKENS, [POINT])
        counts = computed(run)
        run.generate(PROMPTS[1:2], 1, [POINT])
        assert sum(counts) == len(PROMPTS[1]) - len(DOCUMENT)


@pytest.mark.parametrize(
    "settings",
    [{}, nightly(dict(policy="ada-pyramid", budget=160)), nightly(dict(store_dtype="int8"))],
)
def test_a_turn_says_what_it_says_on_an_empty_server(gemma, settings):
    oracle = None if "store_dtype" in settings else MaskedArchitecture(gemma)
    with engine(gemma, EVERY | settings, **CACHING) as run:
        free, counts = run.free_blocks(), computed(run)
        found = turns(run, 4)
        assert run.counters.evictions_decode and run.counters.stores_reused == 3
        # The window of an eviction is computed anew, and blocks are reused as a whole.
        assert sum(counts) <= 4 * (30 + 50 + 32 + 2 * 32) + 300 < 2 * len(found[-1][0])
        for prompt, answer, lives in found[2:] if oracle is not None else ():
            assert check_tokens(oracle, prompt, answer, lives) == (50, 50)
        reused = run.counters.stores_reused
        empty = turns(run, 4, before=lambda: run.llm.reset_prefix_cache())
        assert run.counters.stores_reused == reused
        assert [answer for _, answer, _ in empty] == [answer for _, answer, _ in found]
        assert run.free_blocks() == free


@pytest.mark.nightly
def test_branches_of_one_conversation_do_not_mix(gemma):
    oracle = MaskedArchitecture(gemma)
    with engine(gemma, EVERY, **CACHING) as run:
        said = turns(run, 3)[-1]
        prompts = [[*said[0], *said[1], *random_prompt(90, seed=seed)] for seed in range(200, 204)]
        together = run.generate(prompts, 50)
        for prompt, answer, lives in zip(prompts, together, run.lives(), strict=True):
            assert check_tokens(oracle, prompt, answer, lives[-1:]) == (50, 50)
        assert run.counters.stores_reused >= 2 + len(prompts)
        alone = []
        for prompt in prompts:
            lose(run)
            assert run.llm.reset_prefix_cache()
            alone += run.generate([prompt], 50)
        assert together == alone


@pytest.mark.nightly
def test_preempted_requests_take_the_store_again(gemma):
    """A pool too small for all of them; what they replay sees the same store and windows."""
    oracle = MaskedArchitecture(gemma)
    asked = [POINT | {"kv_eviction_interval": 0}] * len(PROMPTS)
    options = CACHING | dict(num_gpu_blocks_override=45, max_model_len=832)
    with engine(gemma, SETTINGS, **options) as run:
        outputs = run.generate(PROMPTS, 200, asked)
        lives = run.lives()
        assert run.free_blocks() == 44
        assert run.counters.stores_reused > len(PROMPTS) - 1
    assert any(len(mine) > 1 and mine[-1].evictions for mine in lives), "nobody was preempted"
    for prompt, output, mine in zip(PROMPTS, outputs, lives, strict=True):
        assert check_tokens(oracle, prompt, output, mine) == (200, 200)


@pytest.mark.parametrize("settings", [{}, nightly(dict(policy="ada-pyramid", budget=160))])
def test_a_conversation_that_the_kv_cache_lost_comes_back(gemma, settings):
    oracle = MaskedArchitecture(gemma)
    with engine(gemma, EVERY | dict(store_memory="1G") | settings, **CACHING) as run:
        counts = computed(run)
        found = turns(run, 4, before=lambda: lose(run))
        assert run.counters.stores_restored_memory == run.counters.stores_reused == 3
        # After a pause, what came after the last store is computed anew.
        assert sum(counts) <= 300 + 4 * (30 + 50 + 96 + 32 + 2 * 32)
        for prompt, answer, lives in found:
            assert check_tokens(oracle, prompt, answer, lives) == (50, 50)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Gemma3Text", "Llama4Text"])
@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_a_restart_in_the_middle_of_a_conversation(tmp_path, name, stored):
    path = architecture(name, tmp_path / "model", head_dim=64)
    settings = EVERY | dict(store_dtype=stored, store_path=str(tmp_path / "stores"))
    with engine(path, settings, **CACHING) as first:
        prompt, answer, _ = turns(first, 3)[-1]
        # A server takes this step by itself.
        first.core.step()
        first.worker.kv_eviction.stores.tiers.flush()
        kept = first.recorder.saved
    with engine(path, settings, **CACHING) as run:
        run.recorder.saved.update(kept)
        found = turns(run, 2, start=prompt + answer)
        assert (run.counters.stores_restored_file, run.counters.stores_reused) == (1, 2)
        assert run.llm.reset_prefix_cache()
    with engine(path, EVERY | dict(store_dtype=stored), **CACHING) as empty:
        for asked, said, _ in found:
            assert empty.generate([asked], 50) == [said]
            assert empty.llm.reset_prefix_cache()
        assert empty.counters.stores_reused == 0

"""LMCache's connector never gets what an eviction has touched: `make connectors`.

LMCache itself runs, from the folder that ``KVEVICT_LMCACHE`` names. Only the kernels that copy its
chunks are replaced, because it has them for GPUs only.
"""

import os
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.triton_utils import dispatcher

from tests.e2e.test_lora import SERVED, adapter_and_merged
from tests.e2e.test_stores import computed, lose
from tests.e2e.test_tenants import check_separation, tenants
from tests.models import random_prompt
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens
from vllm_kvevict.engine.remote_prefill import RemotePrefill, _check_lmcache

__all__ = ["adapter_and_merged", "tenants"]

FOLDER = os.environ.get("KVEVICT_LMCACHE")
pytestmark = pytest.mark.skipif(not FOLDER, reason="KVEVICT_LMCACHE names no folder")

BLOCK = 32
TRANSFER = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both")
OPTIONS = dict(max_num_batched_tokens=1024, max_model_len=1024, enable_prefix_caching=True)
SETTINGS = dict(policy="ada-snapkv", budget=128, interval=32, allow="none")
PROMPTS = [random_prompt(300 + 37 * i, seed=80 + i) for i in range(3)]
NEW_TOKENS = 60
NEVER = {"kv_eviction": "none"}
POINT = {"kv_eviction_at": 200}


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


@pytest.fixture
def caching(tiny_model, monkeypatch):
    """A context with an engine that has LMCache, and the chunks that were copied."""
    monkeypatch.syspath_prepend(FOLDER)
    for name, value in dict(
        CHUNK_SIZE=BLOCK, LOCAL_CPU="True", MAX_LOCAL_CPU_SIZE=0.2, SAVE_DECODE_CACHE="True",
        TRACK_USAGE="false", LOG_LEVEL="WARNING", DISABLE_BANNER=1,
    ).items():  # fmt: skip
        monkeypatch.setenv(f"LMCACHE_{name}", str(value))
    # vLLM looks into everything that was imported, and what numba made has no ``__dict__``.
    monkeypatch.setattr(dispatcher, "_rebind_kernels", lambda kernels: None)
    import lmcache.v1.gpu_connector as connectors
    from lmcache.integration.vllm import utils

    from tests.e2e.lmcache_copies import Copies

    copies = SimpleNamespace(made=None)

    def create(config, metadata, *args, **kwargs):
        copies.made = Copies(metadata.kv_shape, BLOCK)
        return copies.made

    monkeypatch.setattr(connectors, "CreateGPUConnector", create)

    @contextmanager
    def start(chunk=BLOCK, settings=SETTINGS, **options):
        monkeypatch.setenv("LMCACHE_CHUNK_SIZE", str(chunk))
        # LMCache reads its configuration once in a process.
        monkeypatch.setattr(utils, "_config_instance", None)
        asked = OPTIONS | dict(kv_transfer_config=TRANSFER) | options
        try:
            with engine(tiny_model, settings, **asked) as run:
                yield run
                assert not copies.made.pinned(), "a look-up left chunks in memory"
        finally:
            # The worker of an engine in this process is never told to stop.
            from lmcache.integration.vllm.utils import ENGINE_NAME
            from lmcache.v1.cache_engine import LMCacheEngineBuilder

            LMCacheEngineBuilder.destroy(ENGINE_NAME)

    return SimpleNamespace(start=start, copies=copies)


def check(run, oracle, texts, outputs):
    for text, output, lives in zip(texts, outputs, run.lives(), strict=True):
        assert check_tokens(oracle, text, output, lives) == (len(output), len(output))


def test_prompts_are_saved_whole_and_loaded_before_their_window(tiny_model, oracle, caching):
    """A request that continues an answer finds nothing that was computed after an eviction."""
    with caching.start() as run:
        free = run.free_blocks()
        first = run.generate(PROMPTS, NEW_TOKENS)
        check(run, oracle, PROMPTS, first)
        assert run.counters.evictions_decode, "answers go on after evictions"
        made = caching.copies.made
        assert made.saved == sum(len(prompt) // BLOCK for prompt in PROMPTS)
        lose(run)
        counts = computed(run)
        check(run, oracle, PROMPTS, run.generate(PROMPTS, NEW_TOKENS))
        assert [lives[0].evictions[0].n for lives in run.lives()] == list(map(len, PROMPTS))
        assert made.loaded >= made.saved
        assert sum(counts) <= 3 * (NEW_TOKENS - 1 + 2 * BLOCK), "prompts were loaded"
        lose(run)
        longer = [prompt + answer for prompt, answer in zip(PROMPTS, first, strict=True)]
        found = run.generate(longer, NEW_TOKENS, [NEVER] * 3)
        assert run.free_blocks() == free
    with engine(tiny_model, SETTINGS, **OPTIONS) as alone:
        assert found == alone.generate(longer, NEW_TOKENS, [NEVER] * 3)


def test_nothing_is_saved_that_depends_on_an_eviction(oracle, caching):
    """Neither tokens after a point nor requests that start with a store."""
    document = PROMPTS[0][:200]
    texts = [document + random_prompt(60 + 40 * i, seed=90 + i) for i in range(3)]
    with caching.start() as run:
        check(run, oracle, texts[:1], run.generate(texts[:1], NEW_TOKENS, [POINT]))
        check(run, oracle, texts[1:], run.generate(texts[1:], NEW_TOKENS, [POINT] * 2))
        assert run.counters.stores_reused == 2
        made = caching.copies.made
        assert not made.saved
        lose(run)
        check(run, oracle, texts, run.generate(texts, NEW_TOKENS))
        saved = made.saved
        assert saved > 6, "without a point the same prompts are saved"
        lose(run)
        check(run, oracle, texts, run.generate(texts, NEW_TOKENS, [POINT] * 3))
        assert made.saved == saved


def test_preempted_requests_are_saved_and_loaded(oracle, caching):
    with caching.start() as run:
        schedule, count = run.scheduler.schedule, 0

        def resetting(*args, **kwargs):
            nonlocal count
            count += 1
            if count in (8, 30):
                assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
            return schedule(*args, **kwargs)

        run.scheduler.schedule = resetting
        asked = [{}, POINT, NEVER]
        outputs = run.generate(PROMPTS, NEW_TOKENS, asked)
        check(run, oracle, PROMPTS, outputs)
        assert [len(lives) for lives in run.lives()] == [3, 3, 3]


def test_a_load_that_fails_ends_its_request_alone(oracle, caching, monkeypatch):
    """The prompt has evicted in the step that should have loaded it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

    def failed(self):
        spoiled = caching.copies.made.spoiled
        now = set(spoiled)
        spoiled.clear()
        return now

    monkeypatch.setattr(LMCacheConnectorV1, "get_block_ids_with_load_errors", failed)
    with caching.start() as run:
        free, made = run.free_blocks(), caching.copies.made
        run.generate(PROMPTS, NEW_TOKENS)
        lose(run)
        made.spoil = {made.loaded + 2}
        outputs = run.generate(PROMPTS, NEW_TOKENS)
        assert sorted(map(len, outputs)) == [0, NEW_TOKENS, NEW_TOKENS]
        for text, output, lives in zip(PROMPTS, outputs, run.lives(), strict=True):
            assert not output or check_tokens(oracle, text, output, lives)[0] == NEW_TOKENS
        assert run.free_blocks() == free
        # The prefix cache has nothing of what was loaded and computed over it.
        check(run, oracle, PROMPTS, run.generate(PROMPTS, NEW_TOKENS))


@pytest.mark.parametrize("chunk", [BLOCK, 256])
def test_a_load_is_whole_if_its_step_is_short(oracle, caching, chunk):
    """LMCache loads no more than the tokens up to the end of a step, which may end inside the
    window that is computed again."""
    texts = [random_prompt(515 + 9 * i, seed=400 + i) for i in range(3)]
    with caching.start(chunk, max_num_batched_tokens=40, max_num_seqs=8) as run:
        free = run.free_blocks()
        check(run, oracle, texts, run.generate(texts, NEW_TOKENS))
        lose(run)
        counts = computed(run)
        check(run, oracle, texts, run.generate(texts, NEW_TOKENS))
        assert sum(counts) <= 3 * (NEW_TOKENS - 1 + 2 * BLOCK), "prompts were loaded"
        assert [lives[0].evictions[0].n for lives in run.lives()] == list(map(len, texts))
        assert run.free_blocks() == free


@pytest.mark.parametrize("chunk", [BLOCK, 64])
def test_answers_are_saved_until_the_first_eviction_in_short_steps(oracle, caching, chunk):
    """``LMCACHE_SAVE_DECODE_CACHE`` while prompts are computed in parts (LMCache#2327).

    The first request evicts within its answer, the second never, and the third has not by then.
    """
    texts = [random_prompt(n, seed=440 + n) for n in (120, 333, 20)]
    asked, new_tokens = [{}, NEVER, {}], 100
    with caching.start(chunk, max_num_batched_tokens=40, max_num_seqs=8) as run:
        free, made = run.free_blocks(), caching.copies.made
        outputs = run.generate(texts, new_tokens, asked)
        check(run, oracle, texts, outputs)
        first, never, later = [life.evictions for (life,) in run.lives()]
        assert first and not never and not later
        # The last token was never computed, and after an eviction nothing is saved.
        ends = [first[0].n, *(len(text) + new_tokens - 1 for text in texts[1:])]
        assert len(texts[0]) < ends[0]
        assert ends[0] // chunk < (len(texts[0]) + new_tokens - 1) // chunk
        assert made.saved == sum(end // chunk for end in ends)
        lose(run)
        longer = [text + output + [5] for text, output in zip(texts, outputs, strict=True)]
        counts = computed(run)
        check(run, oracle, longer, run.generate(longer, 6, [NEVER] * 3))
        rest = [len(text) - end // chunk * chunk for text, end in zip(longer, ends, strict=True)]
        assert sum(counts) == sum(rest) + 3 * 5, "answers were loaded"
        assert run.free_blocks() == free


def test_logprobs_of_a_prompt_that_lmcache_has(tiny_model, oracle, caching):
    """A load brings no logits, so the whole prompt is computed (vllm#57269)."""

    def asked(llm):
        params = SamplingParams(
            temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=1
        )
        outputs = llm.generate([dict(prompt_token_ids=text) for text in PROMPTS], params)
        return [list(one.outputs[0].token_ids) for one in outputs], [
            [one.prompt_logprobs[i][text[i]].logprob for i in range(1, len(text))]
            for one, text in zip(outputs, PROMPTS, strict=True)
        ]

    with engine(tiny_model, None, **OPTIONS) as stock:
        _, expected = asked(stock)
    with caching.start() as run:
        free, made = run.free_blocks(), caching.copies.made
        run.generate([text[:200] for text in PROMPTS], 1)
        lose(run)
        counts = computed(run)
        run.recorder.lives.clear()
        outputs, found = asked(run.llm)
        check(run, oracle, PROMPTS, outputs)
        assert all(life.evictions for (life,) in run.lives())
        assert not made.loaded
        assert sum(counts) == sum(map(len, PROMPTS)) + 3 * (NEW_TOKENS - 1)
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
        assert run.free_blocks() == free
        # Afterwards the same prompts are loaded.
        lose(run)
        check(run, oracle, PROMPTS, run.generate(PROMPTS, NEW_TOKENS))
        assert made.loaded == sum(len(text) // BLOCK for text in PROMPTS)


def test_hits_that_end_inside_a_chunk(oracle, caching):
    """LMCache loads a chunk of 256 tokens as a whole, also over blocks of a prefix-cache hit that
    another request reads (LMCache#2206, #2263)."""
    document = random_prompt(545, seed=410)
    text = document + random_prompt(100, seed=411)
    with caching.start(256, SETTINGS | dict(shared_blocks="evict")) as run:
        free = run.free_blocks()
        check(run, oracle, [text], run.generate([text], 1))
        for blocks in range(18):
            lose(run)
            hit = document[: blocks * BLOCK]
            run.generate([[*hit, 5]], 1, [NEVER])
            made, counts = caching.copies.made.loaded, computed(run)
            texts = [[*hit, *random_prompt(70, seed=420 + blocks)], text]
            check(run, oracle, texts, run.generate(texts, 6, [NEVER, {}]))
            assert [life.evictions != [] for (life,) in run.lives()] == [False, True]
            # 70 tokens of the one, and of the other what follows the chunks or the hit.
            found = max(2 * 256, blocks * BLOCK)
            assert sum(counts) == 70 + len(text) - found + 2 * 5
            assert caching.copies.made.loaded - made == max(0, 2 - blocks * BLOCK // 256)
        assert run.free_blocks() == free


@pytest.mark.parametrize("asked", [{}, NEVER], ids=["evicts", "never evicts"])
def test_a_second_salt_or_adapter_finds_nothing(tenants, caching, asked):
    """LMCache names chunks by their tokens alone (LMCache#2878, #4825)."""
    with caching.start(**SERVED) as run:
        free = run.free_blocks()
        check_separation(run, tenants, PROMPTS[2], asked, salted=False)
        assert run.free_blocks() == free


def of_lmcache(text):
    """The keys of a text's chunks, and the memory that holds them."""
    from lmcache.integration.vllm.utils import ENGINE_NAME
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    cache = LMCacheEngineBuilder.get(ENGINE_NAME)
    keys = [key for _, _, key in cache.token_database.process_tokens(text)]
    return cache, keys, cache.storage_manager.storage_backends["LocalCPUBackend"]


def test_a_hit_that_is_longer_than_what_lmcache_has(oracle, caching):
    """The prefix cache has blocks that LMCache has forgotten (LMCache#2106)."""
    with caching.start() as run:
        check(run, oracle, PROMPTS, run.generate(PROMPTS, NEW_TOKENS))
        made = caching.copies.made
        for left in (0, 3, 8):
            for text in PROMPTS:
                _, keys, memory = of_lmcache(text)
                assert all(memory.remove(key) for key in keys[left:])
            saved, loaded = made.saved, made.loaded
            check(run, oracle, PROMPTS, run.generate(PROMPTS, NEW_TOKENS))
            assert made.loaded == loaded, "the prefix cache has more"
            assert made.saved - saved == sum(len(text) // BLOCK - left for text in PROMPTS)
        lose(run)
        check(run, oracle, PROMPTS, run.generate(PROMPTS, NEW_TOKENS))
        assert made.loaded > loaded


@pytest.mark.parametrize("chunk", [BLOCK, 256])
def test_a_look_up_that_is_longer_than_what_is_loaded(oracle, caching, chunk):
    """LMCache forgets a chunk between its look-up and its load (LMCache#2106)."""
    texts = [random_prompt(515 + 9 * i, seed=400 + i) for i in range(3)]
    with caching.start(chunk) as run:
        free = run.free_blocks()
        run.generate(texts, 1)
        lose(run)
        cache, keys, memory = of_lmcache(texts[1])
        retrieve = cache.retrieve

        def late(tokens, *args, **kwargs):
            if tokens[:9] == texts[1][:9]:
                assert memory.remove(keys[-1])
            return retrieve(tokens, *args, **kwargs)

        cache.retrieve = late
        outputs = run.generate(texts, NEW_TOKENS)
        cache.retrieve = retrieve
        assert list(map(len, outputs)) == [NEW_TOKENS, 0, NEW_TOKENS]
        for text, output, lives in zip(texts, outputs, run.lives(), strict=True):
            assert not output or check_tokens(oracle, text, output, lives)[0] == NEW_TOKENS
        assert run.free_blocks() == free
        # The prefix cache has nothing of what was computed over the missing blocks.
        check(run, oracle, texts, run.generate(texts, NEW_TOKENS))


@pytest.mark.parametrize("asked", [{}, NEVER], ids=["evicts", "never evicts"])
def test_nothing_is_saved_that_was_computed_over_a_load_that_failed(oracle, caching, asked):
    """Two requests compute over the missing blocks: one loads them, and one hits them. Without the
    plugin LMCache saves what they compute, and answers later requests from it."""
    document = PROMPTS[0][:200]
    texts = [document + random_prompt(100 + 40 * i, seed=430 + i) for i in range(2)]
    with caching.start() as run:
        free, made = run.free_blocks(), caching.copies.made
        run.generate([document], 1)
        saved = made.saved
        lose(run)
        cache, keys, memory = of_lmcache(document)
        retrieve = cache.retrieve

        def late(tokens, *args, **kwargs):
            memory.remove(keys[-1])
            return retrieve(tokens, *args, **kwargs)

        cache.retrieve = late
        outputs = run.generate([*texts, PROMPTS[1]], NEW_TOKENS, [asked] * 3)
        cache.retrieve = retrieve
        assert list(map(len, outputs)) == [0, 0, NEW_TOKENS]
        found = made.saved - saved
        assert found >= len(PROMPTS[1]) // BLOCK, "what was computed over no loss is saved"
        for text in texts:
            _, keys, memory = of_lmcache(text)
            assert not any(memory.contains(key) for key in keys[5:])
        for _ in range(2):
            lose(run)
            again = run.generate(texts, NEW_TOKENS, [asked] * 2)
            check(run, oracle, texts, again)
        assert made.loaded > 5 and run.free_blocks() == free


@pytest.mark.parametrize(
    "name",
    ["enable_async_loading", "enable_blending", "enable_pd", "use_layerwise", "save_unfull_chunk"],
)
def test_settings_that_are_not_supported_are_refused(name, caching):
    from lmcache.v1.config import LMCacheEngineConfig

    assert hasattr(LMCacheEngineConfig.from_defaults(), name)
    connector = SimpleNamespace(_lmcache_engine=SimpleNamespace(config=SimpleNamespace()))
    _check_lmcache(connector)
    setattr(connector._lmcache_engine.config, name, True)
    with pytest.raises(ValueError, match=f"support {name} of LMCache, because"):
        _check_lmcache(connector)


def test_a_server_does_not_start_with_such_a_setting(caching, monkeypatch):
    monkeypatch.setenv("LMCACHE_SAVE_UNFULL_CHUNK", "True")
    with (
        pytest.raises(ValueError, match="support save_unfull_chunk of LMCache, because LMCache"),
        caching.start(),
    ):
        pytest.fail("it started")


@pytest.mark.parametrize(
    "mended",
    [
        test_prompts_are_saved_whole_and_loaded_before_their_window,
        test_nothing_is_saved_that_depends_on_an_eviction,
    ],
)
def test_each_part_is_needed(mended, tiny_model, oracle, caching, monkeypatch):
    monkeypatch.setattr(RemotePrefill, "visible", lambda self, output: output)
    arguments = dict(tiny_model=tiny_model, oracle=oracle, caching=caching)
    names = mended.__code__.co_varnames[: mended.__code__.co_argcount]
    with pytest.raises((AssertionError, RuntimeError)):
        mended(**{name: arguments[name] for name in names})


def test_lmcache_is_that_of_the_folder(caching):
    assert sys.modules["lmcache"].__file__.startswith(FOLDER)

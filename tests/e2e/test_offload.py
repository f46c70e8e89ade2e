"""Blocks that vLLM offloads come back under eviction as they were computed, and no others."""

import pytest

from tests.e2e.test_stores import computed, lose
from tests.models import random_prompt
from tests.nightly import nightly, some
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens
from tests.profiles import random_profile
from vllm_kvevict.engine.offload import OffloadGuard
from vllm_kvevict.worker import cpu_offload as spec

DOCUMENT = random_prompt(500, seed=1)
PROMPTS = [DOCUMENT + random_prompt(20 + 13 * i, seed=10 + i) for i in range(4)]
NEW_TOKENS = 60
OPTIONS = dict(
    max_num_batched_tokens=256, max_model_len=1024, kv_offloading_size=0.25,
    enable_prefix_caching=True, disable_log_stats=False,
)  # fmt: skip
SETTINGS = dict(policy="ada-snapkv", budget=128, interval=32, allow="none")
CASES = {
    "ada-snapkv": {},
    "defensive": dict(policy="ada-defensive"),
    "no window": dict(policy="streaming-llm"),
    "two groups": dict(policy="ada-pyramid", budget=160),
    "inside prompts": dict(prefill_interval=128),
    "evicts shared": dict(shared_blocks="evict"),
}


class LateCopies(spec.CopyingWorker):
    """Copies as late as vLLM allows: when somebody waits, and loads six steps after."""

    LATE = 6

    def __init__(self, *args):
        super().__init__(*args)
        self.late = {}
        self.age = {}

    def _submit(self, job_id, inside, outside, store):
        self.late[job_id] = (inside, outside, store)
        self.age[job_id] = 0
        return True

    def _make(self, job_id):
        """In order, as vLLM asks: all that was submitted before it is made too."""
        for earlier in [one for one in self.late if one <= job_id]:
            super()._submit(earlier, *self.late.pop(earlier))
            self._running[earlier].result()

    def get_finished(self):
        for job_id in list(self.late):
            self.age[job_id] += 1
            if self.age[job_id] > self.LATE:
                self._make(job_id)
        return super().get_finished()

    def wait(self, job_ids):
        for job_id in sorted(job_ids & self.late.keys()):
            self._make(job_id)


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(spec, "CopyingWorker", LateCopies)


def loaded(run):
    """Prompt tokens that came from host memory so far."""
    return run.scheduler.connector.scheduler._kv_evict_loaded


def watch(run):
    """Count the tokens of every load."""
    half = run.scheduler.connector.scheduler
    half._kv_evict_loaded = 0
    update = half.update_state_after_alloc

    def updated(request, blocks, num_external_tokens):
        half._kv_evict_loaded += num_external_tokens
        update(request, blocks, num_external_tokens)

    half.update_state_after_alloc = updated
    return run


def checked(run, oracle, prompts, asked=None, new_tokens=NEW_TOKENS):
    outputs = run.generate(prompts, new_tokens, asked)
    for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
        assert check_tokens(oracle, prompt, output, lives) == (new_tokens, new_tokens)
    return outputs


@pytest.mark.parametrize("case", some(CASES, "ada-snapkv", "two groups", "inside prompts"))
def test_the_next_turn_loads_the_whole_document(tiny_model, oracle, late, case):
    """What the evictions left of the first turn is not what comes back."""
    settings = SETTINGS | CASES[case]
    with engine(tiny_model, settings, **OPTIONS) as run:
        watch(run)
        free = run.free_blocks()
        first = checked(run, oracle, PROMPTS[:1])
        assert run.counters.evictions_prefill and run.counters.evictions_decode
        for prompt in PROMPTS:
            lose(run)
            before, evictions, counts = loaded(run), run.counters.evictions_prefill, computed(run)
            output = checked(run, oracle, [prompt])
            # Where prompts evict as they stream in, what comes before the first eviction's window.
            least = 224 if settings.get("prefill_interval") else len(DOCUMENT) // 32 * 32 - 32
            assert loaded(run) - before >= least
            assert sum(counts) <= len(prompt) - loaded(run) + before + NEW_TOKENS
            assert run.counters.evictions_prefill > evictions
            if prompt is PROMPTS[0]:
                assert output == first
        lose(run)
        assert checked(run, oracle, PROMPTS)[:1] == first or not settings.get("shared_blocks")
        assert run.free_blocks() == free


@pytest.mark.nightly
def test_probe(tiny_model_kv4, tmp_path, late):
    path, _ = random_profile(tmp_path, tiny_model_kv4)
    settings = dict(policy="ada-probe", budget=160, interval=32, profile=str(path))
    oracle = MaskedModel(tiny_model_kv4)
    with engine(tiny_model_kv4, settings, **OPTIONS) as run:
        watch(run)
        first = checked(run, oracle, PROMPTS[:1])
        for prompt in PROMPTS:
            lose(run)
            output = checked(run, oracle, [prompt])
            assert output == first or prompt is not PROMPTS[0]
        assert loaded(run) >= 4 * 480 and run.counters.evictions_prefill >= 5


def test_a_small_pool_preempts_and_comes_back_by_load(tiny_model, oracle, late):
    """Blocks of finished requests are given to others, and stores, before they are copied."""
    prompts = [DOCUMENT[: 250 + 40 * i] + random_prompt(200, seed=30 + i) for i in range(6)]
    small = OPTIONS | dict(num_gpu_blocks_override=44)
    with engine(tiny_model, SETTINGS, **small) as run:
        watch(run)
        for _ in range(3):
            checked(run, oracle, prompts, new_tokens=90)
        assert loaded(run) > 1000
        assert run.counters.evictions_prefill and run.counters.evictions_decode


def test_policies_that_count_every_query_load_nothing(tiny_model, oracle, late):
    with engine(tiny_model, SETTINGS | dict(policy="h2o"), **OPTIONS) as run:
        watch(run)
        checked(run, oracle, PROMPTS[:2])
        lose(run)
        checked(run, oracle, PROMPTS[:2])
        assert loaded(run) == 0 and run.counters.evictions_prefill == 4


def test_points_and_their_stores(tiny_model, oracle, late):
    """What is computed after a point is not stored; a store in the pool goes before a load."""
    point = {"kv_eviction_at": 490}
    with engine(tiny_model, SETTINGS, **OPTIONS) as run:
        watch(run)
        checked(run, oracle, PROMPTS[:1], [point])
        checked(run, oracle, PROMPTS, [point] * 4)
        assert run.counters.stores_reused == 4 and loaded(run) == 0
        lose(run)
        checked(run, oracle, PROMPTS, [point] * 4)
        assert 0 < loaded(run) <= 490
        lose(run)
        before = loaded(run)
        # Only the document is there: the question was computed over its store.
        checked(run, oracle, [PROMPTS[0] + random_prompt(150, seed=99)], [{"kv_eviction": "none"}])
        assert loaded(run) - before == 490 // 32 * 32


@pytest.mark.nightly
def test_stores_outside_the_kv_cache_beside_it(tiny_model, oracle, late, monkeypatch):
    """A store comes back into blocks that requests before it gave back and that are copied yet."""
    waited, settle_first = [], OffloadGuard.settle_first

    def counted(self, loads):
        waited.append(settle_first(self, loads))
        return waited[-1]

    monkeypatch.setattr(OffloadGuard, "settle_first", counted)
    point, none = {"kv_eviction_at": 490}, {"kv_eviction": "none"}
    settings, prompt = SETTINGS | dict(store_memory="1G"), PROMPTS[0]
    small = OPTIONS | dict(num_gpu_blocks_override=24, max_model_len=700, max_num_seqs=1)
    with engine(tiny_model, settings, **small) as run:
        watch(run)
        expected = checked(run, oracle, [prompt], [point])
        for number in range(4):
            other = random_prompt(640 + number, seed=50 + number % 2)
            for asked in (none, {}):
                # It ends with copies under way.
                outputs = run.generate([other, prompt], [1, NEW_TOKENS], [asked, point])
                assert outputs[1] == expected[0]
                for text, output, lives in zip([other, prompt], outputs, run.lives(), strict=True):
                    assert check_tokens(oracle, text, output, lives) == (len(output), len(output))
        assert run.counters.stores_restored_memory == 8
        assert loaded(run) > 500 and any(waited)


@pytest.mark.nightly
def test_requests_that_never_evict_are_vllms(tiny_model, late):
    never = [{"kv_eviction": "none"}] * len(PROMPTS)
    with engine(tiny_model, SETTINGS, **OPTIONS | dict(kv_offloading_size=None)) as other:
        expected = other.generate(PROMPTS, NEW_TOKENS, never)
    with engine(tiny_model, SETTINGS, **OPTIONS) as run:
        watch(run)
        for _ in range(2):
            assert run.generate(PROMPTS, NEW_TOKENS, never) == expected
            lose(run)
        assert loaded(run) >= len(DOCUMENT) // 32 * 32
        assert run.counters.evictions_prefill == 0


def test_a_reset_loses_what_is_in_host_memory(tiny_model, oracle, late):
    """The weights may have changed."""
    with engine(tiny_model, SETTINGS, **OPTIONS) as run:
        watch(run)
        checked(run, oracle, PROMPTS[:1])
        assert run.llm.reset_prefix_cache(reset_connector=True)
        checked(run, oracle, PROMPTS[:1])
        assert loaded(run) == 0


def no_settling(monkeypatch):
    settle = OffloadGuard.settle
    monkeypatch.setattr(OffloadGuard, "settle", lambda *args: settle(*args) and set())


def stored_after_eviction(monkeypatch):
    settle, status = OffloadGuard.settle, OffloadGuard._status

    def settled(self, evictions):
        jobs = settle(self, evictions)
        for eviction in evictions:
            status(self, eviction.request_id).max_offload_tokens = None
        return jobs

    monkeypatch.setattr(OffloadGuard, "settle", settled)


def stored_over_a_store(monkeypatch):
    monkeypatch.setattr(OffloadGuard, "looked_up", lambda self, state: None)


def no_cap(monkeypatch):
    monkeypatch.setattr(OffloadGuard, "_max_loaded", lambda *args: None)


@pytest.mark.parametrize(
    "mutation",
    [nightly(no_settling), nightly(stored_after_eviction), nightly(stored_over_a_store), no_cap],
)
def test_each_part_is_needed(tiny_model, oracle, late, monkeypatch, mutation):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_next_turn_loads_the_whole_document(tiny_model, oracle, None, "ada-snapkv")
        test_points_and_their_stores(tiny_model, oracle, None)
        test_a_small_pool_preempts_and_comes_back_by_load(tiny_model, oracle, None)

"""A decode server loads whole prompts, evicts them in its first step, and answers as one server."""

import pytest
from vllm.config import KVTransferConfig

from tests.e2e.test_stored_tokens import NEAR
from tests.e2e.test_stores import computed
from tests.models import random_prompt
from tests.nightly import nightly, some
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens
from tests.oracles.packed import BITS, packed
from tests.prefilled import Prefilled
from tests.profiles import random_profile
from vllm_kvevict.engine.remote_prefill import RemotePrefill
from vllm_kvevict.engine.scheduler import EvictingScheduler

PROMPTS = [random_prompt(300 + 37 * i, seed=20 + i) for i in range(4)]
NEW_TOKENS = 70
OPTIONS = dict(max_num_batched_tokens=256, max_model_len=1024)
SETTINGS = dict(policy="ada-snapkv", budget=128, interval=32)
CASES = {
    "ada-snapkv": {},
    "snapkv": dict(policy="snapkv"),
    "defensive": dict(policy="defensive"),
    "ada-defensive": dict(policy="ada-defensive"),
    "scissorhands": dict(policy="scissorhands"),
    "tova": dict(policy="tova"),
    "nacl": dict(policy="nacl"),
    "subgen": dict(policy="subgen"),
    "streaming-llm": dict(policy="streaming-llm"),
    "two groups": dict(policy="ada-pyramid", budget=160, options=dict(groups=2)),
    "evicts shared": dict(shared_blocks="evict"),
    "under pressure": dict(when="pressure", options=dict(low_mark=0.9, high_mark=0.95)),
    "a share": dict(budget="25%"),
    "int4": dict(budget=200, store_dtype="int4"),
}


def decode(**options):
    transfer = KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both")
    return OPTIONS | dict(kv_transfer_config=transfer) | options


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


def loaded_prompts(model, settings, oracle, evict_at_end=True, near=0.0, **options):
    """Serve :data:`PROMPTS` with KV that another engine computed; check every token."""
    other = Prefilled(model, PROMPTS, settings, **OPTIONS)
    with engine(model, settings, **OPTIONS) as alone:
        expected = alone.generate(PROMPTS, NEW_TOKENS)
    with engine(model, settings, **decode(**options)) as run, other.serve(run) as loads:
        free, counts = run.free_blocks(), computed(run)
        outputs = run.generate(PROMPTS, NEW_TOKENS)
        assert sorted(loads) == sorted(len(prompt) - 1 for prompt in PROMPTS)
        # The window and at most a block before it are computed; without prefills of whole prompts.
        assert sum(counts) <= len(PROMPTS) * (NEW_TOKENS - 1 + 64)
        for prompt, output, lives in zip(PROMPTS, outputs, run.lives(), strict=True):
            assert check_tokens(oracle, prompt, output, lives, near) == (NEW_TOKENS, NEW_TOKENS)
            if evict_at_end:
                assert lives[0].evictions[0].n == len(prompt), "did not evict in its first step"
        assert run.counters.evictions_prefill >= len(PROMPTS) * evict_at_end
        assert run.free_blocks() == free
    return outputs, expected


@pytest.mark.parametrize("case", some(CASES, "ada-snapkv"))
def test_tokens_equal_those_of_one_server(tiny_model, oracle, case):
    settings, near = SETTINGS | CASES[case], 0.0
    if "store_dtype" in settings:
        oracle, near = MaskedModel(tiny_model, stored=packed(*BITS["int4"])), NEAR
    outputs, expected = loaded_prompts(
        tiny_model, settings, oracle, evict_at_end="when" not in settings, near=near
    )
    assert outputs == expected


@pytest.mark.nightly
@pytest.mark.parametrize("groups", [1, 2])
def test_probe_with_one_budget_for_all_layers(tiny_model_kv4, tmp_path, groups):
    """One group keeps the layout of the other server's cache, and uses the profile's probes."""
    path, _ = random_profile(tmp_path, tiny_model_kv4)
    settings = dict(policy="ada-probe", budget=160, interval=32, profile=str(path))
    settings["options"] = dict(groups=groups)
    outputs, expected = loaded_prompts(tiny_model_kv4, settings, MaskedModel(tiny_model_kv4))
    assert outputs == expected


@pytest.mark.nightly
@pytest.mark.parametrize("caching", [True, False])
def test_memory_for_two_prompts(tiny_model, oracle, caching):
    """Requests wait for one another, and some of their prompts are computed after a preemption."""
    other = Prefilled(tiny_model, PROMPTS, SETTINGS, **OPTIONS)
    small = decode(num_gpu_blocks_override=28, max_model_len=512, enable_prefix_caching=caching)
    prompts = PROMPTS * 3
    with engine(tiny_model, SETTINGS, **small) as run, other.serve(run) as loads:
        free, most = run.free_blocks(), 0
        schedule = run.scheduler.schedule

        def scheduled(*args, **kwargs):
            nonlocal most
            output = schedule(*args, **kwargs)
            most = max(most, len(run.scheduler.running))
            return output

        run.scheduler.schedule = scheduled
        outputs = run.generate(prompts, NEW_TOKENS)
        for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
            assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS)
        assert len(loads) >= len(PROMPTS)
        assert most > 2, "evicted requests leave room for others"
        assert run.free_blocks() == free


def test_requests_with_an_eviction_point_load_nothing(tiny_model, oracle):
    """vLLM would publish the blocks after the point as if they were computed over all tokens."""
    other = Prefilled(tiny_model, PROMPTS, SETTINGS, **OPTIONS)
    point = [{"kv_eviction_at": 200}] * 2 + [{}] * 2
    with engine(tiny_model, SETTINGS, **decode()) as run, other.serve(run) as loads:
        outputs = run.generate(PROMPTS, NEW_TOKENS, point)
        for prompt, output, lives in zip(PROMPTS, outputs, run.lives(), strict=True):
            assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS)
        assert sorted(loads) == sorted(len(prompt) - 1 for prompt in PROMPTS[2:])
        assert [lives[0].evictions[0].n for lives in run.lives()[:2]] == [200, 200]


def no_replay(monkeypatch):
    monkeypatch.setattr(RemotePrefill, "replayed", lambda *_: 0)


def points_are_loaded(monkeypatch):
    monkeypatch.setattr(RemotePrefill, "_may_load", lambda *_: True)


def one_token_less(monkeypatch):
    """The window lacks its first query: with the last token, 31 of 32 are computed."""
    replayed = RemotePrefill.replayed
    monkeypatch.setattr(RemotePrefill, "replayed", lambda *args: min(30, replayed(*args)))


@pytest.mark.parametrize(
    "mutation", [nightly(no_replay), nightly(points_are_loaded), nightly(one_token_less)]
)
def test_each_part_is_needed(tiny_model, oracle, monkeypatch, mutation):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        test_tokens_equal_those_of_one_server(tiny_model, oracle, "ada-snapkv")
        test_requests_with_an_eviction_point_load_nothing(tiny_model, oracle)


def test_without_the_connector_the_scheduler_is_as_before(tiny_model):
    with engine(tiny_model, SETTINGS, **OPTIONS) as run:
        assert isinstance(run.scheduler, EvictingScheduler) and run.scheduler._remote is None

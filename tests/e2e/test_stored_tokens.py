"""Stores in few bits: every greedy token equals transformers' over the same survivors, quantised
once (float32)."""

import pytest
import torch

from tests.e2e.test_sharing import OPTIONS, POINT, PROMPTS
from tests.e2e.test_sharing import SETTINGS as SHARING
from tests.e2e.test_stores import lose
from tests.e2e.test_tokens import PLAIN, assert_exact
from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens
from tests.oracles.packed import BITS, packed
from tests.profiles import random_profile
from vllm_kvevict.ops.token_format import PackedFormat

NEAR = 0.01
"""The two sides compute a key in another order, so that now and then one falls on the other side of
a step of its levels. Logits of this model differ by a multiple of this where a rotation, a scale or
a token is wrong."""
LENGTHS = (700, 333, 1200, 1, 60, 250)
ONCE_AGAIN, TWICE_AGAIN = 140, 280
"""Tokens of an answer in which four-bit stores evict once and twice: every 128 tokens."""


@pytest.fixture(scope="module", params=list(BITS))
def stored(request, tiny_model):
    return request.param, MaskedModel(tiny_model, stored=packed(*BITS[request.param]))


@pytest.fixture(scope="module")
def oracle_kv4(tiny_model_kv4):
    return MaskedModel(tiny_model_kv4, stored=packed(*BITS["int4"]))


@pytest.mark.parametrize(("chunk", "caching"), [(64, True), nightly(4096, False)])
def test_tokens_equal_the_oracle(tiny_model, stored, chunk, caching):
    name, oracle = stored
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    with engine(
        tiny_model,
        dict(policy="ada-snapkv", budget=280, interval=64, store_dtype=name),
        max_num_batched_tokens=chunk,
        enable_prefix_caching=caching,
    ) as run:
        free = run.free_blocks()
        outputs = assert_exact(oracle, run, prompts, TWICE_AGAIN, near=NEAR)
        assert len(run.lives()[2][-1].evictions) >= 3
        assert run.free_blocks() == free
        if caching:
            assert_exact(oracle, run, prompts, TWICE_AGAIN, near=NEAR)
        if name == "int4":
            exact = MaskedModel(tiny_model)
            three = zip(prompts[:3], outputs[:3], run.lives()[:3], strict=True)
            found = [check_tokens(exact, *one, NEAR) for one in three]
            assert sum(agreed for agreed, _ in found) < 0.95 * sum(total for _, total in found), (
                "the oracle could not tell: nothing was quantised"
            )


def test_every_policy_at_once(tiny_model_kv4, oracle_kv4):
    prompts = [random_prompt(400 + 20 * i, seed=i) for i in range(len(PLAIN))]
    asked = [{"kv_eviction": name} for name in PLAIN]
    settings = dict(policy="snapkv", budget=280, interval=32, allow=PLAIN, store_dtype="int4")
    with engine(tiny_model_kv4, settings, max_num_batched_tokens=256) as run:
        together = run.generate(prompts, ONCE_AGAIN, asked)
        lives = run.lives()
        for index, prompt in enumerate(prompts):
            assert len(lives[index][0].evictions) >= 2, PLAIN[index]
            agreed, total = check_tokens(oracle_kv4, prompt, together[index], lives[index], NEAR)
            assert agreed == total == ONCE_AGAIN, PLAIN[index]


def not_rotated(monkeypatch):
    rotation = PackedFormat.rotation

    def encode(self, keys, values):
        monkeypatch.setattr(PackedFormat, "rotation", lambda _, size, device: torch.eye(size))
        try:
            return ENCODE(self, keys, values)
        finally:
            monkeypatch.setattr(PackedFormat, "rotation", rotation)

    monkeypatch.setattr(PackedFormat, "encode", encode)


def scale_of_a_neighbour(monkeypatch):
    def encode(self, keys, values):
        *codes, scales = ENCODE(self, keys, values)
        return [*codes, scales.roll(1, 0)]

    monkeypatch.setattr(PackedFormat, "encode", encode)


ENCODE = PackedFormat.encode


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", [not_rotated, scale_of_a_neighbour])
def test_each_part_of_the_format_is_needed(tiny_model, monkeypatch, mutation):
    mutation(monkeypatch)
    stored = "int4", MaskedModel(tiny_model, stored=packed(*BITS["int4"]))
    with pytest.raises(AssertionError):
        test_tokens_equal_the_oracle(tiny_model, stored, 64, False)


def test_a_token_is_quantised_once(tiny_model, monkeypatch):
    """When it is first kept. Another time would change neither its levels nor its scale, but for
    rounding, so that answers do not show it."""
    quantised = 0

    def encode(self, keys, values):
        nonlocal quantised
        quantised += keys[..., 0].numel()
        return ENCODE(self, keys, values)

    monkeypatch.setattr(PackedFormat, "encode", encode)
    settings = dict(policy="ada-snapkv", budget=280, interval=64, store_dtype="int4")
    with engine(tiny_model, settings) as run:
        quantised = 0  # A worker compiles its kernels with some tokens of its own.
        run.generate([random_prompt(700, seed=700)], TWICE_AGAIN)
        ((life,),) = run.lives()
    tail = first = 0
    for eviction in life.evictions:
        kept = [p for layer in eviction.positions for head in layer for p in head]
        first += sum(p >= tail for p in kept)
        tail = (eviction.n - 32) // 32 * 32
    assert len(life.evictions) >= 3 and quantised == first > 0


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["probe", "ada-probe"])
def test_policies_with_a_profile(tiny_model_kv4, oracle_kv4, tmp_path, policy):
    path, _ = random_profile(tmp_path, tiny_model_kv4, units=8)
    settings = dict(policy=policy, budget="25%", interval=64, profile=str(path))
    prompts = [random_prompt(n, seed=n) for n in (900, 640)]
    with engine(tiny_model_kv4, settings | dict(store_dtype="int4")) as run:
        assert_exact(oracle_kv4, run, prompts, 150, near=NEAR)
        assert all(len(lives[0].evictions) >= 2 for lives in run.lives())


@pytest.mark.nightly
def test_a_store_grows_with_the_answer(tiny_model):
    """Also where a page holds more tokens than are asked for between two evictions."""
    oracle = MaskedModel(tiny_model, stored=packed(*BITS["int4"]))
    settings = dict(policy="snapkv", budget="25%", interval=32, store_dtype="int4")
    with engine(tiny_model, settings) as run:
        assert_exact(oracle, run, [random_prompt(300, seed=3)], 700, near=NEAR)
        ((life,),) = run.lives()
    kept = [len(eviction.positions[0][0]) for eviction in life.evictions]
    # From 768 tokens on, a quarter of the memory holds the window and five pages of 120 tokens.
    assert kept[0] == 120 and kept == sorted(kept) and kept[-1] >= 600


@pytest.mark.parametrize("tier", ["memory", nightly("file")])
def test_a_store_comes_back_as_it_was(tiny_model, tmp_path, tier):
    """Requests share a store, in the cache and outside."""
    oracle = MaskedModel(tiny_model, stored=packed(*BITS["int4"]))
    settings = SHARING | dict(budget=400, store_dtype="int4")
    settings |= dict(store_memory="1G") if tier == "memory" else dict(store_path=str(tmp_path))
    asked, options = [POINT] * len(PROMPTS), OPTIONS | dict(enable_prefix_caching=True)
    with engine(tiny_model, settings, **options) as run:
        free = run.free_blocks()
        expected = run.generate(PROMPTS, ONCE_AGAIN, asked)
        assert run.counters.stores_published == run.counters.stores_saved == 1
        kept = run.recorder.saved
        if tier == "memory":
            lose(run)
            check_shared(oracle, run, expected, asked)
            assert run.counters.stores_restored_memory == 1
        assert run.free_blocks() == free
    if tier == "file":
        with engine(tiny_model, settings | dict(store_dtype="auto"), **options) as run:
            run.generate(PROMPTS[:1], 4, asked[:1])
            assert run.counters.stores_restored_file == 0, "another format is another folder"
        with engine(tiny_model, settings, **options) as run:
            run.recorder.saved.update(kept)
            check_shared(oracle, run, expected, asked)
            assert run.counters.stores_restored_file == 1


def check_shared(oracle, run, expected, asked) -> None:
    assert run.generate(PROMPTS, ONCE_AGAIN, asked) == expected
    for prompt, output, lives in zip(PROMPTS, expected, run.lives(), strict=True):
        assert len(lives[0].evictions) >= 2
        assert check_tokens(oracle, prompt, output, lives, NEAR) == (ONCE_AGAIN, ONCE_AGAIN)


def test_a_share_is_one_of_the_memory(tiny_model):
    """A quarter of the memory keeps most tokens."""
    prompts = [random_prompt(n, seed=n) for n in (1500, 1250)]
    oracle = MaskedModel(tiny_model, stored=packed(*BITS["int4"]))
    settings = dict(policy="ada-snapkv", budget="25%", interval=64, store_dtype="int4")
    with engine(tiny_model, settings) as run:
        free = run.free_blocks()
        for budget, share in (("25%", 0.25), ("12.5%", 0.125), ("40%", 0.4)):
            asked = [{"kv_eviction_budget": budget}] * 2
            assert_exact(oracle, run, prompts, 80, asked, near=NEAR)
            for prompt, lives in zip(prompts, run.lives(), strict=True):
                first = lives[0].evictions[0]
                heads = first.positions[0]
                blocks = (int(share * len(prompt)) - 32) // 32
                everything = (len(prompt) - 32) // 32 * 32 // 120
                assert sum(map(len, heads)) / len(heads) == 120 * min(blocks, everything)
        assert run.free_blocks() == free


@pytest.mark.nightly
@pytest.mark.parametrize("caching", [False, True])
def test_preemption(tiny_model, caching):
    oracle = MaskedModel(tiny_model, stored=packed(*BITS["int4"]))
    prompts = [random_prompt(n, seed=n) for n in (500, 480, 460, 440, 420, 400, 380, 360)]
    with engine(
        tiny_model,
        dict(policy="ada-snapkv", budget=160, interval=160, store_dtype="int4"),
        num_gpu_blocks_override=40,
        max_model_len=1024,
        max_num_batched_tokens=512,
        enable_prefix_caching=caching,
    ) as run:
        assert_exact(oracle, run, prompts, 250, near=NEAR)
        assert any(len(lives) > 1 and lives[-1].evictions for lives in run.lives())
        assert run.free_blocks() == 39


BESIDE = {
    "evictions inside prompts": (dict(prefill_interval=160, budget=280), {}),
    "under pressure": (
        dict(when="pressure", budget=280),
        dict(num_gpu_blocks_override=60, max_model_len=1536),
    ),
    "every so many tokens": (dict(every=160), dict(enable_prefix_caching=True)),
    "drafts": (
        dict(budget=280),
        dict(
            speculative_config=dict(
                method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
            )
        ),
    ),
    "layers in groups": (dict(policy="ada-pyramid", budget=400), {}),
    "the offload": (dict(budget=280), dict(kv_offloading_size=0.25, enable_prefix_caching=True)),
    "audits": (
        dict(budget=280, audit="100%"),
        dict(enable_prefix_caching=True, disable_log_stats=False),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", BESIDE)
def test_beside_other_features(tiny_model_kv4, oracle_kv4, name):
    settings, options = BESIDE[name]
    settings = dict(policy="ada-snapkv", interval=64, store_dtype="int4", budget="25%") | settings
    prompts = [random_prompt(n, seed=n) for n in (700, 333, 900)]
    with engine(tiny_model_kv4, settings, max_num_batched_tokens=256, **options) as run:
        free = run.free_blocks()
        for _ in range(2):
            assert_exact(oracle_kv4, run, prompts, 150, near=NEAR)
        assert run.free_blocks() == free

"""A store that the KV cache lost comes back from host memory or a file, as it was."""

import os
import random

import pytest
import torch

from tests.e2e.test_sharing import CASES, DOCUMENT, NEW_TOKENS, OPTIONS, PROMPTS, SETTINGS
from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens
from tests.profiles import random_profile
from tests.unit.stores.test_files import damage
from vllm_kvevict.stores.files import unpack

POINT = {"kv_eviction_at": len(DOCUMENT)}
MEMORY = dict(store_memory="1G")


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


def serving(model, settings):
    return engine(model, settings, enable_prefix_caching=True, **OPTIONS)


def lose(run):
    """Let the KV cache lose everything that nobody holds, as other requests would make it."""
    pool = run.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})


def computed(run):
    """Tokens of every step from here on."""
    counts, schedule = [], run.scheduler.schedule

    def scheduled(*args, **kwargs):
        output = schedule(*args, **kwargs)
        counts.append(output.total_num_scheduled_tokens)
        return output

    run.scheduler.schedule = scheduled
    return counts


@pytest.mark.parametrize(
    "case", ["ada-snapkv", nightly("defensive"), nightly("two groups"), nightly("whole blocks")]
)
def test_it_comes_back_from_host_memory(tiny_model, oracle, case):
    settings = SETTINGS | MEMORY | CASES[case]
    point = settings.pop("at", len(DOCUMENT))
    asked = [{"kv_eviction_at": point}] * len(PROMPTS)
    with serving(tiny_model, settings) as run:
        free = run.free_blocks()
        run.generate(PROMPTS[:1], NEW_TOKENS, asked[:1])
        for number in range(1, 3):
            lose(run)
            counts = computed(run)
            outputs = run.generate(PROMPTS, NEW_TOKENS, asked)
            prefilled = sum(len(prompt) - point for prompt in PROMPTS)
            assert sum(counts) == prefilled + len(PROMPTS) * (NEW_TOKENS - 1)
            assert run.counters.stores_restored_memory == number
            assert run.counters.tokens_restored_memory == number * point
            for prompt, output, lives in zip(PROMPTS, outputs, run.lives(), strict=True):
                assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS)
        assert run.counters.stores_saved == run.counters.stores_published == 1
        assert run.free_blocks() == free


@pytest.mark.parametrize("policy", ["ada-probe", nightly("snapkv")])
def test_policies_that_protect_fewer_tokens_than_others(tiny_model_kv4, tmp_path, policy):
    """Under probe the last 8 tokens stay, under others the window of 32: other tails."""
    path, _ = random_profile(tmp_path, tiny_model_kv4)
    server = dict(policy="ada-probe", budget=288, interval=32, allow="snapkv", profile=str(path))
    asked = [POINT | {"kv_eviction": policy}] * 2
    oracle = MaskedModel(tiny_model_kv4)
    with serving(tiny_model_kv4, server | dict(store_memory="1G")) as run:
        run.generate(PROMPTS[:1], 4, asked[:1])
        lose(run)
        outputs = run.generate(PROMPTS[1:3], 70, asked)
        assert run.counters.stores_restored_memory == 1
        for prompt, output, lives in zip(PROMPTS[1:3], outputs, run.lives(), strict=True):
            assert check_tokens(oracle, prompt, output, lives) == (70, 70)


def test_another_tenant_does_not_get_it(tiny_model):
    with serving(tiny_model, SETTINGS | MEMORY) as run:
        run.generate(PROMPTS[:1], 4, [POINT])
        lose(run)
        run.llm.reset_prefix_cache()
        run.generate(PROMPTS[:1], 4, [POINT])
        assert run.counters.stores_restored_memory == 0, "the weights may have changed"
        lose(run)
        run.generate([[7, *PROMPTS[0][1:]]], 4, [POINT])
        assert run.counters.stores_restored_memory == 0


def test_the_least_recently_used_leaves(tiny_model):
    """Room for two of three documents."""
    documents = [random_prompt(500, seed=70 + i) for i in range(3)]
    with serving(tiny_model, SETTINGS | MEMORY) as run:
        run.generate(documents[:1], 2, [{"kv_eviction_at": 480}])
        num_bytes = run.scheduler._stores.kept_bytes
    with serving(tiny_model, SETTINGS | dict(store_memory=2 * num_bytes + 1)) as run:
        for document in [*documents, documents[1], documents[2], documents[0]]:
            run.generate([document], 2, [{"kv_eviction_at": 480}])
            lose(run)
            assert run.scheduler._stores.kept_bytes <= 2 * num_bytes
        assert run.counters.stores_restored_memory == 2
        assert len(run.worker.kv_eviction.stores.tiers._kept) == 2


@pytest.mark.parametrize("case", [nightly("ada-snapkv"), "defensive", nightly("two groups")])
def test_it_comes_back_in_another_process(tiny_model, oracle, tmp_path, case):
    settings = SETTINGS | CASES[case] | dict(store_path=str(tmp_path))
    with serving(tiny_model, settings) as first:
        expected = first.generate(PROMPTS, NEW_TOKENS, [POINT] * len(PROMPTS))
        assert first.counters.stores_saved == 1
        kept = first.recorder.saved
    with serving(tiny_model, settings) as run:
        run.recorder.saved.update(kept)
        counts = computed(run)
        assert run.generate(PROMPTS, NEW_TOKENS, [POINT] * len(PROMPTS)) == expected
        prefilled = sum(len(prompt) - len(DOCUMENT) for prompt in PROMPTS)
        assert sum(counts) == prefilled + len(PROMPTS) * (NEW_TOKENS - 1)
        assert run.counters.stores_restored_file == 1 and run.counters.stores_published == 0
        for prompt, output, lives in zip(PROMPTS, expected, run.lives(), strict=True):
            assert check_tokens(oracle, prompt, output, lives) == (NEW_TOKENS, NEW_TOKENS)


def test_servers_that_differ_share_nothing(tiny_model, tiny_model_kv4, tmp_path):
    settings = SETTINGS | dict(store_path=str(tmp_path))
    with serving(tiny_model, settings) as first:
        first.generate(PROMPTS[:1], 2, [POINT])
    for model, other in [(tiny_model_kv4, {}), (tiny_model, dict(window=16))]:
        with serving(model, settings | other) as run:
            run.generate(PROMPTS[:1], 2, [POINT])
            assert run.counters.stores_restored_file == 0 == run.counters.files_refused
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_is_not_what_it_must_be_is_refused(tiny_model, tmp_path):
    with serving(tiny_model, SETTINGS | dict(store_path=str(tmp_path))) as run:
        tiers = run.worker.kv_eviction.stores.tiers
        (expected,) = run.generate(PROMPTS[:1], 20, [POINT])
        tiers.flush()
        (file,) = tmp_path.glob("*/*.safetensors")
        whole = file.read_bytes()
        tensors = unpack(bytearray(whole))
        flipped = bytearray(whole)
        flipped[-1000] ^= 4
        for number, damaged in enumerate([bytes(flipped), whole[:-1], b"", whole[:2000]], 1):
            file.write_bytes(damaged)
            lose(run)
            assert run.generate(PROMPTS[:1], 20, [POINT]) == [expected]
            tiers.flush()
            assert run.counters.files_refused == number
            written = unpack(bytearray(file.read_bytes()))
            assert written.keys() == tensors.keys(), "it is written again"
            assert all(torch.equal(written[name], tensors[name]) for name in tensors)
        assert run.counters.stores_restored_file == 0
        file.unlink()
        os.mkfifo(file)
        lose(run)
        assert run.generate(PROMPTS[:1], 20, [POINT]) == [expected]
        assert run.counters.files_refused == number + 1


def test_files_follow_the_weights_through_resets(tiny_model, tmp_path):
    """Reload as vLLM does: sleep keeps the weights, and an update replaces them."""
    settings = SETTINGS | dict(store_path=str(tmp_path))
    with serving(tiny_model, settings) as run:
        tiers = run.worker.kv_eviction.stores.tiers

        def ask(expected=None):
            lose(run)
            (output,) = run.generate(PROMPTS[:1], 20, [POINT])
            tiers.flush()
            assert expected in (None, output)
            return output

        first = ask()
        assert run.llm.reset_prefix_cache()
        # The weights are checked in a step, and the scheduler hears of it at its end.
        run.generate([[5, 6, 7]], 2, [{}])
        ask(first)
        assert run.counters.stores_restored_file == 1
        weight = next(run.worker.model_runner.get_model().parameters())
        before = weight.data.clone()
        weight.data *= 1.5
        assert run.llm.reset_prefix_cache()
        changed = ask()
        assert changed != first and run.counters.stores_restored_file == 1
        ask(changed)
        assert run.counters.stores_restored_file == 2
        assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
        weight.data.copy_(before)
        assert run.llm.reset_prefix_cache()
        run.generate([[5, 6, 7]], 2, [{}])
        ask(first)
        assert run.counters.stores_restored_file == 3
        run.worker.reload_weights()
        ask(first)
        run.generate([[7, *PROMPTS[0][1:]]], 4, [POINT])
        tiers.flush()
        assert len(list(tmp_path.glob("*/*.safetensors"))) == 2, "no reset: nothing is written"


def only_file(folder, but=()):
    (file,) = [one for one in folder.glob("*/*.safetensors") if one not in but]
    return file


@pytest.mark.nightly
@pytest.mark.parametrize("faults", [40, 1000])
def test_no_fault_gives_a_wrong_token(tiny_model, tiny_model_kv4, tmp_path, faults):
    """Flips, cuts, holes, swaps; another document's, tenant's, server's and model's file."""
    from vllm import SamplingParams

    others, foreign, rng = [], {}, random.Random(27)
    for name, model, more in [
        ("model", tiny_model_kv4, {}),
        ("server", tiny_model, dict(window=16)),
    ]:
        folder = tmp_path / name
        with serving(model, SETTINGS | dict(store_path=str(folder)) | more) as run:
            run.generate(PROMPTS[:1], 1, [POINT])
            run.worker.kv_eviction.stores.tiers.flush()
        foreign[name] = only_file(folder).read_bytes()
    folder = tmp_path / "own"
    with serving(tiny_model, SETTINGS | dict(store_path=str(folder))) as run:
        tiers = run.worker.kv_eviction.stores.tiers
        tenant = dict(prompt_token_ids=PROMPTS[0], cache_salt="another")
        asked = SamplingParams(temperature=0, max_tokens=1, extra_args=POINT)
        run.llm.generate([tenant], asked, use_tqdm=False)
        run.generate([[7, *PROMPTS[0][1:]]], 1, [POINT])
        tiers.flush()
        others = list(folder.glob("*/*.safetensors"))
        foreign |= {number: file.read_bytes() for number, file in enumerate(others)}
        (expected,) = run.generate(PROMPTS[:1], 4, [POINT])
        tiers.flush()
        file = only_file(folder, others)
        whole = file.read_bytes()
        for _ in range(faults):
            kind = rng.choice([*foreign, *["damaged"] * 6])
            file.write_bytes(damage(whole, rng) if kind == "damaged" else foreign[kind])
            lose(run)
            assert run.generate(PROMPTS[:1], 4, [POINT]) == [expected], f"after {kind}"
            tiers.flush()
        refused, restored = run.counters.files_refused, run.counters.stores_restored_file
        assert refused + restored == faults and refused > 0.9 * faults

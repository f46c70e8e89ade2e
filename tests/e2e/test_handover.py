"""A prompt that one engine computes and another one answers, through files."""

import threading
import time
from concurrent.futures import Future

import pytest

from tests.e2e.test_sharing import CASES, SETTINGS
from tests.e2e.test_stored_tokens import NEAR
from tests.e2e.test_stores import computed, lose, serving
from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.masked import MaskedModel, check_tokens
from tests.oracles.packed import BITS, packed
from vllm_kvevict.engine import store_reads
from vllm_kvevict.stores.files import unpack

PROMPTS = [random_prompt(length, seed=length + 1) for length in (500, 513, 481)]
NEW_TOKENS = 80
POINT = {"kv_eviction_at": -1}
INT4 = dict(budget=300, store_dtype="int4")
GIVEN = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
SHORT = random_prompt(60, seed=5)


def hand_over(run, prompts, **settings):
    """What an engine that computes prompts answers a proxy, and the tokens of its steps."""
    from vllm import SamplingParams

    counts = computed(run)
    outputs = run.llm.generate(
        [dict(prompt_token_ids=prompt) for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=1, extra_args=GIVEN | settings),
        use_tqdm=False,
    )
    run.worker.kv_eviction.stores.tiers.flush()
    return [output.kv_transfer_params for output in outputs], counts


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


@pytest.mark.parametrize(
    "case",
    [nightly("ada-snapkv"), "defensive", nightly("two groups"), nightly("evicts once"), "int4"],
)
def test_tokens_are_those_of_one_engine(tiny_model, oracle, tmp_path, case):
    settings, near = SETTINGS | (INT4 if case == "int4" else CASES[case]), 0.0
    if case == "int4":
        oracle, near = MaskedModel(tiny_model, stored=packed(*BITS["int4"])), NEAR
    with serving(tiny_model, settings) as one:
        expected = one.generate(PROMPTS, NEW_TOKENS, [POINT] * len(PROMPTS))
    settings |= dict(store_path=str(tmp_path))
    with serving(tiny_model, settings) as prefill:
        given, counts = hand_over(prefill, PROMPTS)
        assert sum(counts) == sum(map(len, PROMPTS))
        sizes, kept = prefill.scheduler._stores._sizes, prefill.recorder.saved
    assert all(params["do_remote_prefill"] for params in given)
    assert not any(params["do_remote_decode"] for params in given)
    with serving(tiny_model, settings) as decode:
        decode.recorder.saved.update(kept)
        counts = computed(decode)
        asked = [{"kv_transfer_params": params} for params in given]
        assert decode.generate(PROMPTS, NEW_TOKENS, asked) == expected
        assert sum(counts) == len(PROMPTS) * NEW_TOKENS, "one token of every prompt"
        counters = decode.counters
        assert counters.stores_restored_file == len(PROMPTS)
        assert counters.tokens_restored_file == sum(len(prompt) - 1 for prompt in PROMPTS)
        assert counters.evictions_prefill == 0
        # Bytes: the store, and whole blocks from its tail's start to the point.
        stored, rules = 0, decode.scheduler._table.rules
        for prompt, lives in zip(PROMPTS, decode.lives(), strict=True):
            point, tail_start = len(prompt) - 1, lives[0].evictions[0].tail_start
            for group, rule in rules.items():
                blocks = rule.store_blocks(point) + -(-point // 32) - tail_start // 32
                spec = sizes.specs[group]
                heads = sizes.layers[group] * spec.num_kv_heads
                stored += heads * blocks * 32 * 2 * spec.head_size * 4
        files = [unpack(bytearray(file.read_bytes())) for file in tmp_path.glob("*/*.safetensors")]
        pages = [t for file in files for name, t in file.items() if name.endswith(".pages")]
        assert sum(t.nbytes for t in pages) == stored
        assert counters.bytes_restored_file == sum(t.nbytes for f in files for t in f.values())
        for prompt, output, lives in zip(PROMPTS, expected, decode.lives(), strict=True):
            assert lives[0].evictions[0].n == len(prompt) - 1
            same = check_tokens(oracle, prompt, output, lives, near)
            assert same == (NEW_TOKENS, NEW_TOKENS)


def first_logprobs(run, prompts, asked):
    """The log-probabilities of five candidates for each first token."""
    from vllm import SamplingParams

    outputs = run.llm.generate(
        [dict(prompt_token_ids=prompt) for prompt in prompts],
        [
            SamplingParams(temperature=0, max_tokens=4, logprobs=5, extra_args=dict(mine))
            for mine in asked
        ],
        use_tqdm=False,
    )
    firsts = [output.outputs[0].logprobs[0] for output in outputs]
    return [{token: one.logprob for token, one in first.items()} for first in firsts]


def test_a_whole_hit_gives_the_logprobs_of_one_engine(tiny_model, tmp_path):
    """A receiver that finds all of a prompt differed from the first token on (vllm#52617)."""
    settings = SETTINGS | dict(store_path=str(tmp_path))
    with serving(tiny_model, settings) as prefill:
        given, _ = hand_over(prefill, PROMPTS)
        kept = prefill.recorder.saved
    with serving(tiny_model, SETTINGS) as one:
        expected = first_logprobs(one, PROMPTS, [POINT] * len(PROMPTS))
    with serving(tiny_model, settings) as decode:
        decode.recorder.saved.update(kept)
        counts = computed(decode)
        found = first_logprobs(decode, PROMPTS, [{"kv_transfer_params": one} for one in given])
        assert sum(counts) == 4 * len(PROMPTS), "one token of every prompt"
        assert decode.counters.stores_restored_file == len(PROMPTS)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_what_is_not_handed_over(tiny_model, tmp_path):
    """Too short, another policy's, a point inside a chat, and what asks for nothing."""
    settings = SETTINGS | dict(store_path=str(tmp_path), allow="h2o,none")
    with serving(tiny_model, settings) as run:
        assert hand_over(run, [SHORT])[0] == [None]
        assert hand_over(run, PROMPTS[:1], kv_eviction="h2o")[0] == [None]
        assert hand_over(run, PROMPTS[:1], kv_eviction="none")[0] == [None]
        assert hand_over(run, PROMPTS[:1], kv_transfer_params={})[0] == [None]
        assert not list(tmp_path.glob("*/*.safetensors"))
        assert hand_over(run, PROMPTS[:1], kv_eviction_at=480)[0] != [None]
    with serving(tiny_model, SETTINGS | dict(store_memory="1G")) as run:
        assert hand_over(run, PROMPTS[:1])[0] == [None]


def test_a_file_that_is_late_is_waited_for(tiny_model, tmp_path):
    settings = SETTINGS | dict(store_path=str(tmp_path))
    with serving(tiny_model, settings) as run:
        ((given,), _) = hand_over(run, PROMPTS[:1])
        asked = [{"kv_transfer_params": given}]
        (file,) = tmp_path.glob("*/*.safetensors")
        lose(run)
        hidden = file.rename(tmp_path / "hidden")
        threading.Timer(0.7, lambda: hidden.rename(file)).start()
        counts = computed(run)
        run.generate(PROMPTS[:1], 1, asked)
        assert sum(counts) == 1 and run.counters.stores_restored_file == 1


class AtOnce:
    """An executor whose work is done when it is handed over."""

    def submit(self, work, *args):
        done = Future()
        done.set_result(work(*args))
        return done


@pytest.mark.nightly
def test_files_that_never_come_keep_no_other_from_being_read(tiny_model, tmp_path, monkeypatch):
    """However slow steps are: every look is done by the next one, here as it begins."""
    monkeypatch.setattr(store_reads, "FIRST_SEARCH_S", 0)
    monkeypatch.setattr(store_reads, "HANDOVER_TIMEOUT_S", 1)
    settings = SETTINGS | dict(store_path=str(tmp_path))
    with serving(tiny_model, settings) as run:
        ((given,), _) = hand_over(run, PROMPTS[:1])
        lose(run)
        # Else it depends on the interpreter how far threads get beside a busy step.
        monkeypatch.setattr(run.scheduler._stores.reads, "threads", AtOnce())
        never = [
            random_prompt(200, seed=100 + number)
            for number in range(8 * store_reads.MAX_STORES_READ)
        ]
        waited, held, schedule = [], [], run.scheduler.schedule

        def slow(*args, **kwargs):
            time.sleep(0.02)
            waited.append(run.counters.stores_restored_file == 0)
            held.append(len(run.scheduler._stores.reads.reading))
            return schedule(*args, **kwargs)

        run.scheduler.schedule = slow
        asked = [{"kv_transfer_params": given}] * (len(never) + 1)
        run.generate([*never, PROMPTS[0]], 1, asked)
        assert run.counters.stores_restored_file == 1
        assert sum(waited) < 6, "steps that it waited for"
        assert len(held) > 60 and not any(held[30:60]), "slots of the reader"


def test_a_file_that_is_missing_or_damaged_leads_to_a_prefill(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(store_reads, "HANDOVER_TIMEOUT_S", 0.3)
    settings = SETTINGS | dict(store_path=str(tmp_path))
    with serving(tiny_model, settings) as run:
        ((given,), _) = hand_over(run, PROMPTS[:1])
        asked = [{"kv_transfer_params": given}]
        (file,) = tmp_path.glob("*/*.safetensors")
        whole = file.read_bytes()
        expected = run.generate(PROMPTS[:1], 20, asked)
        for damaged in (None, whole[:-1], b"\0" * len(whole)):
            lose(run)
            file.unlink() if damaged is None else file.write_bytes(damaged)
            run.scheduler._stores.reads._absent.clear()
            counts = computed(run)
            assert run.generate(PROMPTS[:1], 20, asked) == expected
            assert sum(counts) == len(PROMPTS[0]) + 19
            run.worker.kv_eviction.stores.tiers.flush()
        assert run.counters.files_refused == 2 and run.counters.stores_restored_file == 0

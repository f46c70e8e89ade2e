"""Rollouts of reinforcement learning: new weights, pauses and resets between and inside answers."""

import asyncio
from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.e2e.test_stores import lose
from tests.models import cached_tiny_llama, random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens
from vllm_kvevict.worker.mixin import EvictionWorkerMixin

PROMPTS = [random_prompt(300 + 37 * i, seed=60 + i) for i in range(3)]
NEW_TOKENS = 70
SETTINGS = dict(policy="ada-snapkv", budget=128, interval=32)
OPTIONS = dict(
    max_num_batched_tokens=512,
    max_model_len=1024,
    enable_prefix_caching=True,
    worker_extension_cls="tests.e2e.trainer.TrainerExtension",
)
POINT = {"kv_eviction_at": 250}


@pytest.fixture(scope="module")
def trained():
    """A checkpoint of the same shape as ``tiny_model`` with other weights."""
    return cached_tiny_llama(kv_heads=2, seed=7)


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return MaskedModel(tiny_model)


@pytest.fixture(scope="module")
def trained_oracle(trained):
    return MaskedModel(trained)


def by_reload(llm, folder):
    llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(folder)))


def by_extension(llm, folder):
    assert llm.collective_rpc("trainer_loads", args=(str(folder),)) == ["EvictingCPUWorker"]


def by_zeroing(llm, folder):
    """``POST /weight_checker`` with ``reset``."""
    llm.collective_rpc("reset_weights")


def by_load_weights(llm, folder):
    llm.collective_rpc("trainer_loads_embeddings", args=(str(folder),))


def checked(run, oracle, prompts, outputs):
    for prompt, output, lives in zip(prompts, outputs, run.lives(), strict=True):
        assert check_tokens(oracle, prompt, output, lives) == (len(output), len(output))


@pytest.mark.parametrize("update", [by_reload, nightly(by_extension)])
def test_answers_after_an_update_are_those_of_a_fresh_engine(
    tiny_model, trained, oracle, trained_oracle, update
):
    with engine(trained, SETTINGS, **OPTIONS) as fresh:
        expected = fresh.generate(PROMPTS, NEW_TOKENS, [POINT] * 3)
    with engine(tiny_model, SETTINGS, **OPTIONS) as run:
        free = run.free_blocks()
        before = run.generate(PROMPTS, NEW_TOKENS, [POINT] * 3)
        checked(run, oracle, PROMPTS, before)
        update(run.llm, trained)
        assert run.llm.reset_prefix_cache(reset_running_requests=True)
        after = run.generate(PROMPTS, NEW_TOKENS, [POINT] * 3)
        checked(run, trained_oracle, PROMPTS, after)
        assert after == expected != before
        assert run.counters.stores_reused == 0, "a store of the old weights"
        update(run.llm, tiny_model)
        assert run.llm.reset_prefix_cache(reset_running_requests=True)
        assert run.generate(PROMPTS, NEW_TOKENS, [POINT] * 3) == before
        assert run.free_blocks() == free


def advance(run, tokens):
    """Step until every request has so many tokens; returns what came so far."""
    outputs = {}
    while len(outputs) < len(PROMPTS) or min(map(len, outputs.values())) < tokens:
        for output in run.llm.llm_engine.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
        if not run.llm.llm_engine.has_unfinished_requests():
            break
    return outputs


def start(run):
    from vllm import SamplingParams

    run.recorder.lives.clear()
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        run.llm.llm_engine.add_request(str(number), dict(prompt_token_ids=prompt), params)


def finish(run, outputs):
    while run.llm.llm_engine.has_unfinished_requests():
        for output in run.llm.llm_engine.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
    return [outputs[str(number)] for number in range(len(PROMPTS))]


def test_an_update_inside_answers(tiny_model, trained, oracle, trained_oracle):
    """Running requests are computed again with the new weights, and evict again."""
    with engine(tiny_model, SETTINGS, **OPTIONS) as run:
        free = run.free_blocks()
        start(run)
        outputs = advance(run, 40)
        run.core.pause_scheduler(mode="keep", clear_cache=False)
        assert run.core.is_scheduler_paused()
        run.llm.llm_engine.step()
        by_reload(run.llm, trained)
        assert run.llm.reset_prefix_cache(reset_running_requests=True)
        run.core.resume_scheduler()
        tokens = finish(run, outputs)
        for prompt, output, lives in zip(PROMPTS, tokens, run.lives(), strict=True):
            assert len(output) == NEW_TOKENS and len(lives) == 2
            first, second = lives
            kept = second.prefill_end - len(prompt)
            assert 40 <= kept < NEW_TOKENS
            assert first.evictions and second.evictions, "evicts before and after the update"
            assert second.evictions[0].n == second.prefill_end
            old, new = output[:kept], output[kept:]
            assert check_tokens(oracle, prompt, old, [first]) == (kept, kept)
            assert check_tokens(trained_oracle, [*prompt, *old], new, [second]) == (
                len(new),
                len(new),
            )
        assert run.free_blocks() == free


@pytest.mark.parametrize("clear", [False, True])
def test_a_pause_that_keeps_requests(tiny_model, oracle, clear):
    """They continue where they were; if the caches are cleared, they are computed again."""
    with engine(tiny_model, SETTINGS, **OPTIONS) as run:
        start(run)
        expected = finish(run, {})
        run.llm.reset_prefix_cache()
        start(run)
        outputs = advance(run, 30)
        run.core.pause_scheduler(mode="keep", clear_cache=clear)
        for _ in range(3):
            assert not run.llm.llm_engine.step(), "nothing runs while paused"
        run.core.resume_scheduler()
        tokens = finish(run, outputs)
        checked(run, oracle, PROMPTS, tokens)
        assert [len(lives) for lives in run.lives()] == [1 + clear] * len(PROMPTS)
        assert tokens == expected or clear, "a kept request evicts where it would have"


def test_a_pause_that_aborts_leaves_nothing(tiny_model, oracle):
    with engine(tiny_model, SETTINGS, **OPTIONS) as run:
        free = run.free_blocks()
        start(run)
        advance(run, 30)
        run.core.pause_scheduler(mode="abort", clear_cache=True)
        assert run.free_blocks() == free and not run.scheduler._table.states
        run.core.resume_scheduler()
        run.llm.llm_engine.abort_request([str(number) for number in range(3)])
        outputs = run.generate(PROMPTS, NEW_TOKENS)
        checked(run, oracle, PROMPTS, outputs)


def scribble(run):
    """Overwrite the memory that vLLM frees with the KV cache during sleep."""
    eviction = run.worker.kv_eviction
    for cache in eviction._caches.values():
        # vLLM's kernels multiply slots that nobody has written by 0.
        cache.pages.fill_(77)
    for tensor in allocated(run.worker):
        tensor.fill_(12345)


def allocated(worker):
    """Tensors of eviction on the device, apart from probes and what is computed by them."""
    eviction = worker.kv_eviction
    for state in eviction.states.values():
        yield from (state.tail_start, state.stores, state.head_indptr, state._kept)
    if worker._rings is not None:
        yield worker._rings._queries
    if eviction.token_stats is not None:
        yield from {t.data_ptr(): t for t in eviction.token_stats._layers.values()}.values()


@pytest.mark.parametrize("mode", ["abort", "keep"])
@pytest.mark.parametrize("tags", [None, nightly(["kv_cache"])])
def test_answers_after_a_sleep(tiny_model, oracle, mode, tags):
    """A CPU frees nothing, so the test overwrites what a GPU would free."""
    settings = dict(policy="ada-defensive", budget=128, interval=32)
    with engine(tiny_model, settings, **OPTIONS) as run:
        free = run.free_blocks()
        start(run)
        outputs = advance(run, 40)
        assert run.counters.evictions_decode
        assert any(state.evicted.any() for state in run.worker.kv_eviction.states.values())
        run.core.sleep(1, mode=mode)
        scribble(run)
        if tags:
            assert not run.core.wake_up(["weights"])
            scribble(run)
        assert run.core.wake_up(tags)
        if mode == "abort":
            run.llm.llm_engine.abort_request([str(number) for number in range(3)])
            start(run)
            outputs = {}
        checked(run, oracle, PROMPTS, finish(run, outputs))
        assert run.free_blocks() == free


def test_what_eviction_allocates_is_freed_with_the_cache(tiny_model, oracle, monkeypatch):
    """All of it is allocated in the pool that vLLM's sleep mode frees, and only it."""
    made = set()

    class Noted(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                made.add(found.untyped_storage().data_ptr())
            return found

    def pool(self, tag):
        return Noted() if tag == "kv_cache" else nullcontext()

    monkeypatch.setattr(EvictionWorkerMixin, "_maybe_get_memory_pool_context", pool)
    settings = dict(policy="ada-defensive", budget=128, interval=32)
    with engine(tiny_model, settings, **OPTIONS) as run:
        tensors = list(allocated(run.worker))
        assert len(tensors) > 6
        assert all(tensor.untyped_storage().data_ptr() in made for tensor in tensors)


@pytest.mark.nightly
def test_pauses_of_a_server_engine(tiny_model, trained):
    """All modes of ``AsyncLLM.pause_generation``, with updates while paused."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        str(tiny_model),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        block_size=32,
        additional_config={"kv_eviction": SETTINGS},
        disable_log_stats=True,
        **OPTIONS,
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    async def ask(llm, name, number, counts=None):
        final = None
        async for output in llm.generate(dict(prompt_token_ids=PROMPTS[number]), params, name):
            final = output.outputs[0]
            if counts is not None:
                counts[name] = len(final.token_ids)
        return list(final.token_ids), final.finish_reason

    def round_of(llm, name, counts=None):
        return [
            asyncio.create_task(ask(llm, f"{name}-{number}", number, counts)) for number in range(3)
        ]

    async def until(condition):
        while not condition():
            await asyncio.sleep(0.005)

    async def update(llm, folder):
        kwargs = dict(weights_path=str(folder))
        await llm.collective_rpc("reload_weights", kwargs=kwargs)
        assert await llm.reset_prefix_cache(reset_running_requests=True)

    async def paused(llm, mode, clear):
        counts = {}
        tasks = round_of(llm, mode, counts)
        await until(lambda: len(counts) == 3 and min(counts.values()) >= 10)
        await llm.pause_generation(mode=mode, clear_cache=clear)
        assert await llm.is_paused()
        return tasks, counts

    async def all_modes():
        llm = AsyncLLM.from_engine_args(arguments)
        try:
            expected = await asyncio.gather(*round_of(llm, "first"))
            assert {reason for _, reason in expected} == {"length"}
            # Wait: running requests end first; one that comes later waits for the end of the pause.
            tasks, _ = await paused(llm, "wait", True)
            assert await asyncio.gather(*tasks) == expected
            late = round_of(llm, "late")
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in late)
            await update(llm, trained)
            await llm.resume_generation()
            trained_answers = await asyncio.gather(*late)
            assert trained_answers != expected
            await update(llm, tiny_model)
            # Keep: the same tokens, with nothing in between.
            tasks, counts = await paused(llm, "keep", False)
            before = dict(counts)
            await asyncio.sleep(0.3)
            assert counts == before and not any(task.done() for task in tasks)
            await llm.resume_generation()
            assert await asyncio.gather(*tasks) == expected
            # Abort: every request ends, and the next ones are answered as ever.
            tasks, _ = await paused(llm, "abort", True)
            aborted = await asyncio.gather(*tasks)
            assert {reason for _, reason in aborted} == {"abort"}
            await update(llm, trained)
            await llm.resume_generation()
            assert await asyncio.gather(*round_of(llm, "last")) == trained_answers
        finally:
            llm.shutdown()

    asyncio.run(asyncio.wait_for(all_modes(), 240))


@pytest.mark.parametrize("update", [by_extension, by_zeroing, nightly(by_reload)])
def test_no_file_holds_a_store_of_weights_that_the_folder_does_not_know(
    tiny_model, trained, tmp_path, update
):
    settings = SETTINGS | dict(store_path=str(tmp_path))
    with engine(tiny_model, settings, **OPTIONS) as run:
        tiers = run.worker.kv_eviction.stores.tiers

        def ask(number):
            lose(run)
            (output,) = run.generate([PROMPTS[number]], 8, [POINT])
            tiers.flush()
            return output, set(tmp_path.glob("**/*.safetensors"))

        _, files = ask(0)
        assert len(files) == 1
        update(run.llm, trained)
        assert ask(1)[1] == files, "nothing is written until the weights are known"
        assert run.llm.reset_prefix_cache(reset_running_requests=True)
        run.generate([[5, 6, 7]], 2, [{}])
        output, now = ask(2)
        assert len(now) == 2
    with engine(tiny_model, settings, **OPTIONS) as other:
        (old,) = other.generate([PROMPTS[2]], 8, [POINT])
        assert other.counters.stores_restored_file == 0, "a store of other weights"
        assert old != output
        other.recorder.saved.update(run.recorder.saved)
        other.generate([PROMPTS[0]], 8, [POINT])
        assert other.counters.stores_restored_file == 1, "the store of its own weights"


def test_without_watching_the_model_a_file_is_written(tiny_model, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(EvictionWorkerMixin, "_watch_weights", lambda self: None)
    with pytest.raises(AssertionError, match="until the weights are known"):
        test_no_file_holds_a_store_of_weights_that_the_folder_does_not_know(
            tiny_model, trained, tmp_path, by_load_weights
        )

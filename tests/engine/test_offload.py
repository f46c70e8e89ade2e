"""Requests for which vLLM loads blocks, in its real scheduler."""

from collections import Counter
from random import Random

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx
from vllm.v1.request import RequestStatus

from tests.engine.cases import lose
from tests.engine.harness import Engine, Setup
from vllm_kvevict.engine.offload import OffloadGuard

SETUP = Setup(budget=40, window=8, interval=16, blocks=26, block_size=8, offload=600)
PROMPT = [2 + number % 700 for number in range(195)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_longer_than_the_pool_goes_on_with_what_was_loaded(asynchronous: bool) -> None:
    """vLLM asks for the blocks of the whole prompt again when they are there."""
    setup = Setup(
        **vars(SETUP) | dict(blocks=25, prefill_interval=64, longest=400, asynchronous=asynchronous)
    )
    engine = Engine(setup, lambda request_id, tokens: 5)
    for number in range(3):
        engine.add(PROMPT, 4)
        engine.finish()
        offload = engine.worker.offload
        assert offload is not None and offload.loads == number
        assert engine.requests[-1].num_output_tokens == 4
        lose(engine)
    assert engine.scheduler.eviction_counters.evictions_prefill >= 6


def test_nothing_is_loaded_in_the_step_after_a_reset() -> None:
    """vLLM ends where it loads for a request that the same step names as preempted."""
    engine = Engine(SETUP, lambda request_id, tokens: 5)
    engine.add(PROMPT, 4)
    engine.finish()
    engine.add(PROMPT, 9)
    while not engine.scheduler.running:
        engine.step()
    offload = engine.worker.offload
    assert offload is not None and offload.loads == 1
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert not offload.loading
    engine.finish()
    lose(engine)
    engine.add(PROMPT, 4)
    engine.finish()
    assert offload.loads == 2, "from then on as before"


@pytest.mark.parametrize("chunks", [3, 600])
def test_memory_that_is_full_stores_nothing_wrong(chunks: int) -> None:
    """vLLM tries again what it could not store, when the request has evicted."""
    engine = Engine(Setup(**vars(SETUP) | dict(offload=chunks)), lambda request_id, tokens: 5)
    for _ in range(3):
        engine.add(PROMPT[:120], 70)
        engine.finish()
        lose(engine)
    offload = engine.worker.offload
    assert offload is not None and (offload.loads > 0) == (chunks > 3)
    assert engine.scheduler.eviction_counters.evictions_decode >= 3


@pytest.mark.parametrize("settles", [True, False])
def test_a_store_comes_back_into_blocks_that_are_still_copied(monkeypatch, settles: bool) -> None:
    """A prompt's blocks are free before vLLM has copied them, and a store needs them."""

    class Never(Random):
        def randrange(self, *args: int) -> int:
            return 10**6

    if not settles:
        monkeypatch.setattr(OffloadGuard, "settle_first", lambda self, loads: set())
    engine = Engine(Setup(**vars(SETUP) | dict(memory=10**9)), lambda request_id, tokens: 5)
    offload, other = engine.worker.offload, [number + 3 for number in PROMPT]
    assert offload is not None
    engine.add(PROMPT, 2, asked={"kv_eviction_at": 180})
    engine.finish()
    rng, offload._rng = offload._rng, Never()
    engine.add(other, 2, asked={"kv_eviction": "none"})
    engine.finish()
    lose(engine)
    engine.add(PROMPT, 2, asked={"kv_eviction_at": 180})
    engine.finish()
    assert engine.scheduler.eviction_counters.stores_restored_memory == 1
    offload._rng = rng
    lose(engine)
    engine.add([*other, 9], 2, asked={"kv_eviction": "none"})
    if settles:
        engine.finish()
        assert offload.loads >= 1
    else:
        with pytest.raises(AssertionError, match="overwritten or never computed"):
            engine.finish()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_goes_on_with_loaded_blocks_while_another_makes_its_store(
    asynchronous: bool,
) -> None:
    """vLLM is asked first: only it notes that a load has ended; its blocks are held till then."""

    class Slow(Random):
        def randrange(self, *args: int) -> int:
            return 10**6

    asked = {"kv_eviction_at": 180}
    setup = dict(blocks=90, max_batched=512, long_prefill=16, asynchronous=asynchronous)
    engine = Engine(Setup(**vars(SETUP) | setup), lambda request_id, tokens: 5)
    engine.add(PROMPT, 2, asked={"kv_eviction": "none"})
    engine.finish()
    lose(engine)
    offload = engine.worker.offload
    assert offload is not None
    rng, offload._rng = offload._rng, Slow()
    loading = engine.add(PROMPT, 4, asked=asked)
    engine.step()
    assert loading.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    maker = engine.add(PROMPT, 4, asked=asked)
    maker.skip_reading_prefix_cache = True
    while not maker.num_computed_tokens:
        engine.step()
    offload._rng = rng
    for job in [*offload._loads, *offload._stores]:
        job[2] = 0
    for _ in range(4):
        engine.step()
    assert maker.num_computed_tokens < 180 and loading in engine.scheduler.running
    engine.finish()
    assert loading.num_output_tokens == maker.num_output_tokens == 4


@pytest.mark.parametrize("groups", [1, 2])
def test_events_describe_chunks_of_several_blocks(groups: int) -> None:
    """Tokens and hashes of every block of a chunk, whoever evicted it (vllm#57159).

    A hash is announced once for each chunk that has it.
    """
    chunk, size = 3, SETUP.block_size
    setup = dict(blocks=80, offload=18, chunk=chunk, events=True, answers=True)
    more = dict(second_budget=64 if groups == 2 else None)
    engine = Engine(Setup(**vars(SETUP) | setup | more), lambda request_id, tokens: 5)
    known: dict[tuple[object, int], tuple[object, ...]] = {}
    believed: Counter[tuple[object, int]] = Counter()
    stored = removed = 0

    def follow(batch: object) -> None:
        nonlocal stored, removed
        for event in batch.events:  # type: ignore[attr-defined]
            if event.medium != "CPU":
                continue
            hashes = [(one, event.group_idx) for one in event.block_hashes]
            if isinstance(event, BlockStored):
                stored += 1
                believed.update(hashes)
                described = event.parent_block_hash, tuple(event.token_ids), event.block_size
                assert known[event.block_hashes[-1], chunk] == (event.block_hashes, *described)
            else:
                assert isinstance(event, BlockRemoved)
                removed += 1
                believed.subtract(hashes)

    engine.scheduler.kv_event_publisher.publish = follow
    memory = engine.scheduler.connector.connector_scheduler.manager._policy.chunks
    # The first 5 blocks are those of all prompts: no whole number of chunks.
    prompts = [PROMPT[: 5 * size] + [9 + number] * (60 + 17 * number) for number in range(6)]
    for prompt in [*prompts, *prompts[:3]]:
        request = engine.add(prompt, 40)
        while not request.is_finished():
            engine.step()
            names = [maybe_convert_block_hash(one) for one in request.block_hashes]
            tokens = list(request.all_token_ids)
            for end in range(chunk, len(names) + 1, chunk):
                first = end - chunk
                parent = names[first - 1] if first else None
                text = tuple(tokens[first * size : end * size])
                known[names[end - 1], chunk] = names[first:end], parent, text, size
    engine.finish()
    expected: Counter[tuple[object, int]] = Counter()
    for key, one in memory.items():
        if one.is_ready:
            name = maybe_convert_block_hash(get_offload_block_hash(key))
            expected.update((each, get_offload_group_idx(key)) for each in known[name, chunk][0])
    assert +believed == expected and min(believed.values()) == 0
    assert stored > 18 > 0 < removed and max(expected.values()) > 1
    assert engine.scheduler.eviction_counters.evictions_decode

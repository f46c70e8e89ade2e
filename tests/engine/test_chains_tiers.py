"""Conversations that return after the KV cache has lost them.

Setup as in ``test_chains``: evictions at 72, 104, 136 and so on, of which each store has 4 blocks.
"""

import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.lora.request import LoRARequest

from tests.engine.cases import ASYNC, BOTH, SYNC, counters, engine, hit, lose, tokens
from tests.engine.faulty_disk import tensors_for
from tests.engine.harness import Engine, Setup
from tests.engine.test_chains import say
from tests.nightly import nightly
from vllm_kvevict.engine import chain_searches, store_reads, tiered_stores
from vllm_kvevict.engine.store_reads import READ_TIMEOUT_S, READERS
from vllm_kvevict.stores.files import StoreFiles

CHAIN = dict(every=32, max_batched=512, blocks=200)


def conversations(setup: Setup, memory: int = 10**9, **changes: Any) -> Engine:
    return engine(replace(setup, memory=memory, **(CHAIN | changes)))


def kept_points(core: Engine) -> list[int]:
    """Points of the stores in host memory, the first to leave first."""
    stores: Any = core.scheduler._stores
    points = {key.name: key.point for key in stores._published}
    return [points.get(name, 0) for name in stores._kept]


@BOTH
def test_the_last_store_of_a_turn_comes_back(setup):
    core = conversations(setup)
    former = core.add(tokens(150), 60)
    core.finish()
    assert counters(core).stores_saved == len(core.worker.host) == 2
    assert kept_points(core) == [136, 200], "the last ones of the prompt and of the answer"
    for turn in range(3):
        lose(core)
        before = former.num_tokens
        former = say(core, former, 40, 40)
        assert before - 32 <= hit(core.step(), former) < before
        core.finish()
        assert counters(core).stores_restored_memory == turn + 1
        assert counters(core).stores_saved == 2 * turn + 4, "two a turn"


@BOTH
@pytest.mark.parametrize("blocks", [200, 30])
def test_an_answer_that_is_not_repeated(setup, blocks):
    """A template drops the reasoning, or a stop string is cut off. What the prompt left is there,
    also if the evictions of the answer wrote to its blocks."""
    core = conversations(setup, blocks=blocks)
    former = core.add(tokens(150), 60)
    core.finish()
    assert bool(counters(core).evictions_in_place) == (blocks == 30)
    lose(core)
    prompt = list(former.all_token_ids)[:150] + tokens(30, 5)
    second = core.add(prompt, 4)
    assert hit(core.step(), second) == 136
    core.finish()
    assert counters(core).stores_restored_memory == 1


@BOTH
def test_the_pool_is_asked_first_and_the_deepest_store_wins(setup):
    core = conversations(setup)
    former = core.add(tokens(150), 60)
    core.finish()
    published = core.scheduler._stores._published
    (last,) = [key for key in published if key.point == 200]
    pool = core.scheduler.kv_cache_manager.block_pool
    second = say(core, former, 30, 4)
    assert hit(core.step(), second) >= 200 and counters(core).stores_restored_memory == 0
    core.finish()
    pool.evict_blocks({block.block_id for block in published[last].groups[0].store})
    third = say(core, former, 30, 4, seed=5)
    assert hit(core.step(), third) == 200 and counters(core).stores_restored_memory == 1
    core.finish()


@BOTH
def test_older_states_of_a_conversation_leave_first(setup):
    core = conversations(setup)
    stores: Any = core.scheduler._stores
    first = core.add(tokens(150), 60)
    core.finish()
    size = stores.kept_bytes
    core.add(tokens(150, 1), 60)
    core.finish()
    say(core, first, 40, 40)
    core.finish()
    assert kept_points(core) == [136, 200, 136, 200, 232, 264]
    stores._memory = 2 * size + size // 2
    say(core, core.requests[-1], 40, 40)
    core.finish()
    assert kept_points(core) == [264, 136, 200, 328, 360], (
        "both of the other one, the last ones here"
    )
    lose(core)
    other = say(core, core.requests[1], 10, 4)
    assert hit(core.step(), other) >= 200
    core.finish()


@BOTH
@pytest.mark.parametrize("steps", [1, nightly(2), 3, nightly(4), 5, nightly(6), nightly(7)])
def test_aborts_while_a_state_is_restored(setup, steps):
    core = conversations(setup, max_batched=40)
    former = core.add(tokens(150), 60)
    core.finish()
    lose(core)
    second, third = (say(core, former, 60, 30, seed=seed) for seed in (1, 2))
    for _ in range(steps):
        core.step()
    core.step(between=lambda: core.abort(second))
    core.finish()
    assert third.num_output_tokens == 30
    lose(core)
    fourth = say(core, third, 10, 4)
    assert hit(core.step(), fourth) >= third.num_tokens - 40
    core.finish()


@BOTH
def test_a_reset_forgets_a_turn_that_was_not_copied_yet(setup):
    core = conversations(setup)
    former = core.add(tokens(150), 60)
    while not former.is_finished():
        core.step()
    core.settle()
    core.reset()
    second = say(core, former, 10, 4)
    assert hit(core.step(), second) == 0
    core.finish()
    assert counters(core).stores_restored_memory == 0


@BOTH
def test_conversations_with_an_adapter_stay_in_the_kv_cache(setup):
    core = conversations(setup)
    adapters = [LoRARequest(name, number, f"/{name}") for number, name in enumerate("ab", 1)]
    former = core.add(tokens(150), 60, lora_request=adapters[0])
    core.finish()
    assert counters(core).stores_published == 5 and counters(core).stores_saved == 0
    second = say(core, former, 30, 4, lora_request=adapters[0])
    assert hit(core.step(), second) >= 200
    core.finish()
    third = say(core, former, 30, 4, lora_request=adapters[1])
    assert hit(core.step(), third) == 0
    core.finish()
    lose(core)
    fourth = say(core, former, 30, 4, lora_request=adapters[0])
    assert hit(core.step(), fourth) == 0
    core.finish()


def serve(folder: Path, setup: Setup, **changes: Any) -> Any:
    """A server that keeps states in the files of a folder, and none in host memory."""
    core: Any = conversations(setup, **changes)
    stores = core.scheduler._stores
    stores._memory, stores.reads.files = 0, StoreFiles(folder, {"model": "a"})
    core.worker.files = StoreFiles(folder, {"model": "a"})
    core.worker.tensors = tensors_for(stores._sizes)
    return core


def run(core: Any, request: Any) -> None:
    for _ in range(3000):
        if request.is_finished():
            break
        core.step()
    core.settle()
    assert request.is_finished(), "it waits for ever"
    core.finish()
    core.worker.files.flush()


@pytest.mark.parametrize("setup", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_server_for_every_turn(setup, tmp_path):
    """Each of them finds the last state that the one before has written."""
    core, said = serve(tmp_path, setup), tokens(150)
    for turn in range(4):
        request = core.add(said, 60)
        run(core, request)
        assert counters(core).stores_restored_file == (turn > 0)
        if turn:
            assert counters(core).tokens_reused >= request.num_prompt_tokens - 40 - 32
        former, core = core, serve(tmp_path, setup)
        core.worker.disk, core.invariants._saved = former.worker.disk, former.invariants._saved
        said = list(request.all_token_ids) + tokens(40, turn)


def test_a_state_is_found_behind_a_long_message(tmp_path, monkeypatch):
    """Nothing was written at the four positions of the message."""
    monkeypatch.setattr(chain_searches, "NAMES_AT_ONCE", 2)
    core = serve(tmp_path, SYNC)
    former = core.add(tokens(150), 60)
    run(core, former)
    lose(core)
    turn = say(core, former, 130, 4)
    run(core, turn)
    assert counters(core).stores_restored_file == 1
    assert counters(core).tokens_reused >= 200


@pytest.mark.parametrize("setup", [SYNC, ASYNC], ids=["sync", "async"])
def test_what_was_made_over_a_state_that_cannot_be_loaded_is_lost_too(setup, tmp_path):
    core = serve(tmp_path, setup)
    request = core.add(tokens(150), 60)
    run(core, request)
    lose(core)
    core.worker.cannot_load = lambda name: True
    second = say(core, request, 60, 30)
    run(core, second)
    # The store of the answer cannot be loaded, nor can the one of the prompt.
    assert counters(core).stores_restored_file == 2 and second.num_preemptions == 2
    core.worker.cannot_load = lambda name: False
    third = say(core, second, 10, 4)
    run(core, third)
    assert counters(core).tokens_reused >= second.num_tokens - 40


@pytest.mark.parametrize("setup", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_state_that_cannot_be_loaded_beside_vllms_offload(setup, tmp_path):
    """vLLM fails if it loads blocks for a request in the step that lists it as preempted."""
    core = serve(tmp_path, setup, offload=60)
    request = core.add(tokens(150), 60)
    run(core, request)
    lose(core)
    core.worker.cannot_load = lambda name: True
    second = say(core, request, 60, 30)
    run(core, second)
    assert second.num_preemptions == 2 and second.num_output_tokens == 30


def test_a_file_system_that_hangs_is_waited_for_for_a_limited_time(tmp_path, monkeypatch):
    """Each of two threads hangs in a search; after that, nobody waits."""
    now = [1000.0]
    for module in (chain_searches, store_reads, tiered_stores):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    core = serve(tmp_path, SYNC)
    former = core.add(tokens(150), 60)
    run(core, former)
    lose(core)

    def hangs(*_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        return future

    core.scheduler._stores.reads.threads = Mock(submit=hangs)
    for number in range(4):
        lose(core)
        turn = say(core, former, 10, 4, seed=number)
        core.step()
        core.step()
        assert (turn.num_computed_tokens > 0) == (number >= READERS)
        now[0] += READ_TIMEOUT_S
        core.step()
        core.step()
        assert turn.num_computed_tokens > 0
        core.abort(turn)
        core.settle()


def lines(core: Engine, steps: int) -> int:
    """Lines that the searches of conversations run in a step, at most."""
    most = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal ran
        if frame.f_code.co_filename != chain_searches.__file__:
            return None
        ran += event == "line"
        return trace

    for _ in range(steps):
        ran, former = 0, sys.gettrace()
        sys.settrace(trace)
        try:
            core.step()
        finally:
            sys.settrace(former)
        most = max(most, ran)
    return most


@BOTH
def test_a_step_does_nothing_for_conversations_whose_searches_go_on_or_have_ended(
    setup, tmp_path, monkeypatch
):
    """They wait for files, and later for a pool that a stream holds."""
    count, now = 60, [1000.0]
    for module in (chain_searches, store_reads, tiered_stores):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    core, searches = serve(tmp_path, setup), list[Future[Any]]()

    def submit(*_: Any) -> Future[Any]:
        searches.append(Future())
        return searches[-1]

    core.scheduler._stores.reads.threads = Mock(submit=submit)
    asked = [core.add(tokens(150, seed), 4) for seed in range(count)]
    core.step()
    core.settle()
    assert len(searches) == count and not any(one.num_computed_tokens for one in asked)
    assert lines(core, 20) < count / 2, "they go on"
    core.hold(0)
    for search in searches:
        search.set_running_or_notify_cancel()
        search.set_result(set())
    assert lines(core, 1) > count, "each one's end is noticed once"
    assert lines(core, 20) < count / 2, "they have ended"
    now[0] += READ_TIMEOUT_S + 1
    assert lines(core, 3) < count, "nor after they have waited for blocks for long"
    assert len(searches) == count
    core.release()
    core.finish()
    assert all(one.num_output_tokens == 4 for one in asked)


def waiting(core: Engine) -> list[str]:
    """Requests in the queue, in order, without those that were set aside."""
    return [request.request_id for request in core.scheduler._waiting_queue._queue]


@pytest.mark.parametrize("kind", ["found nothing", "was cancelled"])
def test_a_request_that_waits_for_blocks_keeps_its_place(tmp_path, monkeypatch, kind):
    """Its files are looked for once, and smaller requests behind it do not take its blocks."""
    now, searches = [1000.0], list[Future[Any]]()
    for module in (chain_searches, store_reads, tiered_stores):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    core = serve(tmp_path, replace(SYNC, max_batched=64))

    def submit(*_: Any) -> Future[Any]:
        searches.append(Future())
        return searches[-1]

    core.scheduler._stores.reads.threads = Mock(submit=submit)
    core.hold(4)
    large = core.add(tokens(400), 4)
    core.step()
    if kind == "found nothing":
        searches[0].set_running_or_notify_cancel()
        searches[0].set_result(set())
    else:
        now[0] += READ_TIMEOUT_S + 1
    core.step()
    core.step()
    small = core.add(tokens(30, 1), 4, asked={"kv_eviction": "none"})
    for _ in range(3):
        now[0] += READ_TIMEOUT_S + 1
        core.step()
        assert waiting(core)[:1] == [large.request_id]
    assert len(searches) == 1 and not small.num_computed_tokens
    core.release()
    core.finish()
    assert large.num_output_tokens == small.num_output_tokens == 4


@BOTH
def test_a_restored_prompt_is_admitted_by_what_it_holds_at_once(setup):
    """The message alone has 50 blocks. A quarter of all tokens and what comes between two evictions
    are fewer than those that are free."""
    core = conversations(setup, budget="25%", max_batched=64, memory=10**9, blocks=120)
    former = core.add(tokens(150), 60)
    core.finish()
    lose(core)
    core.hold(40)
    turn = say(core, former, 400, 20)
    while not turn.num_computed_tokens:
        core.step()
    assert counters(core).stores_restored_memory == 1
    assert counters(core).tokens_reused >= 168
    while not turn.is_finished():
        core.step()
    assert turn.num_output_tokens == 20 and not turn.num_preemptions
    core.release()
    core.finish()

"""Requests that wait for files cost a step nothing, whatever their clients claim."""

import threading
import time
from collections import Counter
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.cases import ASYNC, BOTH, SYNC, counters, engine, lose, tokens
from tests.engine.test_store_files import (
    DOCUMENT,
    ONCE,
    Hanging,
    answer,
    assert_nothing_is_held,
    clock,
    saved,
    serve,
)
from tests.engine.test_waiting_queue import calls
from vllm_kvevict.config.handover import TAKEN_OVER
from vllm_kvevict.engine.store_reads import HANDOVER_TIMEOUT_S, MAX_STORES_READ
from vllm_kvevict.stores import files as files_module
from vllm_kvevict.stores.files import StoreFiles
from vllm_kvevict.stores.shape import StoreSizes
from vllm_kvevict.stores.threads import Threads

assert clock  # A fixture.

WAITING = 60


def counted(monkeypatch: Any) -> Counter[str]:
    """Count the stores whose sizes are computed."""
    seen: Counter[str] = Counter()
    num_bytes = StoreSizes.num_bytes

    def watched(self: StoreSizes, shapes: Any) -> int:
        seen[threading.current_thread().name] += 1
        return num_bytes(self, shapes)

    monkeypatch.setattr(StoreSizes, "num_bytes", watched)
    return seen


@BOTH
def test_a_step_does_nothing_for_documents_that_wait_for_their_files(setup, tmp_path, monkeypatch):
    core = serve(tmp_path, setup)
    hanging = Hanging()
    monkeypatch.setattr(files_module.os, "preadv", hanging)
    for seed in range(WAITING):
        place_file(core, tokens(130, seed))
    asked = [core.add(tokens(130, seed), 4, asked=ONCE) for seed in range(WAITING)]
    core.step()
    core.settle()
    assert not any(request.num_computed_tokens for request in asked), "they wait"
    sizes, seen = counted(monkeypatch), calls(core)
    for _ in range(20):
        core.step()
        assert not core.scheduler.need_mamba_block_aligned_split, "running requests are not clipped"
    assert not sizes[threading.current_thread().name] and not seen
    assert len(core.scheduler.waiting) == WAITING
    hanging.back.set()
    finish(core)


def place_file(core: Any, document: list[int]) -> None:
    """A file under the name of a document's store."""
    request = core.add(document, 4, asked=ONCE)
    key = core.scheduler._table.states[request.request_id].store_key
    core.abort(request)
    core.worker.files.path(key.name, 0).write_bytes(b"x" * 100)


def claiming(core: Any, documents: list[list[int]]) -> list[Any]:
    asked = []
    for document in documents:
        asked.append(core.add(document, 4, asked=ONCE))
        asked[-1].kv_transfer_params = TAKEN_OVER
    return asked


def until_searched(core: Any) -> None:
    """Wait for the search that is under way, as the test's clock does not."""
    deadline = time.monotonic() + 30
    while not core.scheduler._stores.reads.search.done() and time.monotonic() < deadline:
        time.sleep(0.0005)


@BOTH
def test_a_claim_that_another_server_has_the_prompt_costs_little(
    setup, tmp_path, monkeypatch, clock
):
    """Nobody has computed these prompts: clients only say so."""
    core, looks = serve(tmp_path, setup), Counter[str]()
    monkeypatch.setattr(StoreFiles, "present", lambda _, names, __: looks.update(names) or set())
    asked = claiming(core, [tokens(130, seed) for seed in range(WAITING)])
    begun, seen = clock.now, None
    while clock.now < begun + HANDOVER_TIMEOUT_S - 0.1:
        core.step()
        until_searched(core)
        if seen is None and len(core.scheduler._stores.reads.late) == WAITING:
            seen = calls(core)
        time.sleep(0.0005)
        clock.now += 0.01
    assert seen is not None and not seen, "a step examines nobody who waits"
    assert not any(request.num_computed_tokens for request in asked)
    assert len(looks) == WAITING and max(looks.values()) <= 25, "searches become less frequent"
    clock.now += 2 * HANDOVER_TIMEOUT_S
    finish(core)
    assert all(request.num_output_tokens == 4 for request in asked)
    assert_nothing_is_held(core)


@BOTH
def test_those_who_claim_one_document_give_up_together(setup, tmp_path, clock):
    core = serve(tmp_path, setup)
    first = claiming(core, [DOCUMENT])
    deadline = time.monotonic() + 30
    while not core.scheduler._stores.reads.late and time.monotonic() < deadline:
        core.step()
        time.sleep(0.001)
    clock.now += 0.5
    others = claiming(core, [DOCUMENT] * 5)
    plain = core.add([*DOCUMENT, 5], 4, asked=ONCE)
    core.step()
    core.settle()
    assert plain.num_computed_tokens, "who claims nothing does not wait"
    finish(core)
    assert all(one.num_output_tokens == 4 for one in [*first, *others, plain])
    assert counters(core).stores_published == 1 and counters(core).stores_reused == 6
    assert_nothing_is_held(core)


@BOTH
def test_a_late_file_is_found(setup, tmp_path, clock):
    core = serve(tmp_path, setup)
    file = saved(core)
    away = file.rename(tmp_path / "away")
    (request,) = claiming(core, [DOCUMENT])
    for _ in range(100):
        core.step()
        until_searched(core)
        clock.now += 0.01
    assert not request.num_computed_tokens
    away.rename(file)
    while not request.is_finished():
        core.step()
        time.sleep(0.001)
        clock.now += 0.001
    assert counters(core).stores_restored_file == 1
    assert_nothing_is_held(core)


class AtOnce(Threads):
    """Calls end before they are waited for, as on a fast file system."""

    def submit(self, work: Any, *args: Any) -> Any:
        future = super().submit(work, *args)
        wait([future], timeout=30)
        return future


@BOTH
def test_a_claim_counts_if_its_file_is_found_missing_at_once(setup, tmp_path, clock):
    core = serve(tmp_path, setup)
    core.scheduler._stores.reads.threads = AtOnce(2, "reader")
    asked = claiming(core, [tokens(130, seed) for seed in range(3)])
    for _ in range(5):
        core.step()
    core.settle()
    assert not any(request.num_computed_tokens for request in asked)
    clock.now += HANDOVER_TIMEOUT_S + 1
    finish(core)
    assert_nothing_is_held(core)


@BOTH
def test_more_documents_than_are_read_at_once_all_come_back(setup, tmp_path):
    core = serve(tmp_path, setup)
    documents = [tokens(130, seed) for seed in range(3 * MAX_STORES_READ)]
    for document in documents:
        saved(core, document)
    asked = [core.add(document, 4, asked=ONCE) for document in documents]
    for _ in range(5000):
        core.step()
        time.sleep(0.001)
        if all(request.is_finished() for request in asked):
            break
    assert counters(core).stores_restored_file == len(documents)
    assert_nothing_is_held(core)


@pytest.mark.parametrize("memory", [0, 10**9], ids=["files", "memory, too"])
@pytest.mark.parametrize("setup", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_store_that_a_rank_cannot_load_costs_a_prefill(setup, tmp_path, memory):
    """Every token that was computed over it is dropped: here, such tokens are 0, and no others."""
    core = serve(tmp_path, setup)
    saved(core)
    core.scheduler._stores._memory = memory
    lives, sample = [], core.worker.sample
    core.worker.cannot_load = lambda name: (
        not lives and not lives.append({id_: row.life for id_, row in core.worker.rows.items()})
    )

    def wrong(request_id: str, so_far: list[int]) -> int:
        spoiled = bool(lives) and core.worker.rows[request_id].life in lives[0].values()
        return 0 if spoiled else sample(request_id, so_far)

    core.worker.sample = wrong
    asked = [core.add(DOCUMENT + tokens(3, seed), 20, asked=ONCE) for seed in range(3)]
    other = core.add(tokens(20, 7), 20)
    finish(core)
    assert len(lives[0]) >= 1 and any(request.num_preemptions for request in asked)
    assert not other.num_preemptions, "it reads no store"
    for request in [*asked, other]:
        answered = list(request.output_token_ids)
        spoiled = request is other and request.request_id in lives[0]
        assert len(answered) == 20 and (spoiled or 0 not in answered)
    assert counters(core).stores_published == 2, "the document is computed again"
    lose(core)
    answer(core, [*DOCUMENT, 9])
    assert_nothing_is_held(core)


def finish(core: Any) -> None:
    """Run until every request has finished; threads have a moment in every step."""
    deadline = time.monotonic() + 60
    while core.scheduler.has_unfinished_requests() and time.monotonic() < deadline:
        core.step()
        time.sleep(0.0005)
    core.finish()


def test_memory_alone_needs_no_reads():
    core = engine(replace(SYNC, blocks=90, memory=10**9, max_batched=512))
    core.add(tokens(130), 4, asked=ONCE)
    core.finish()
    lose(core)
    core.add(tokens(130), 4, asked=ONCE)
    core.finish()
    assert counters(core).stores_restored_memory == 1

"""The file tier in vLLM's real scheduler, on file systems that fail in every way.

Real files and threads; the shadow worker asserts that whatever is restored is what was saved. Setup
as in ``test_sharing``: an eviction point at 100.
"""

import errno
import gc
import logging
import os
import pickle
import sys
import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.engine.cases import ASYNC, BOTH, SYNC, counters, engine, lose, tokens
from tests.engine.faulty_disk import raising, tag_of, tensors_for
from vllm_kvevict.config.handover import TAKEN_OVER
from vllm_kvevict.engine import store_reads as reads_module
from vllm_kvevict.engine import tiered_stores
from vllm_kvevict.engine.store_reads import HANDOVER_TIMEOUT_S, READ_TIMEOUT_S, READERS
from vllm_kvevict.engine.tiered_stores import TieredStores
from vllm_kvevict.rules.step_plan import StepPlan
from vllm_kvevict.stores import files as files_module
from vllm_kvevict.stores.files import StoreFiles, unpack

ONCE = {"kv_eviction_at": 100, "kv_eviction_interval": 0}
DOCUMENT = tokens(130)
READ = os.preadv


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reads_module, "monotonic", clock)
    monkeypatch.setattr(tiered_stores, "monotonic", clock)
    return clock


def serve(folder: Path, setup=SYNC, memory: int = 0, **options: Any):
    """Build an engine that keeps stores in the files of a folder and in ``memory``."""
    core: Any = engine(replace(setup, blocks=90, memory=10**9, max_batched=512, **options))
    core.regions = shared_memory()
    stores: Any = core.scheduler._stores
    stores._memory, stores.reads.files = memory, StoreFiles(folder, {"model": "a"})
    core.worker.files = StoreFiles(folder, {"model": "a"})
    core.worker.tensors = tensors_for(stores._sizes)
    return core


def answer(core: Any, prompt: list[int], max_tokens: int = 4, given: Any = None, **options: Any):
    """A request that is answered; threads have a moment in every step."""
    request = core.add(prompt, max_tokens, asked=ONCE, **options)
    request.kv_transfer_params = given
    for _ in range(2000):
        if request.is_finished():
            break
        core.step()
        time.sleep(0.001)
    core.settle()
    assert request.is_finished(), "it waits for ever"
    return request


def saved(core: Any, prompt: list[int] = DOCUMENT) -> Path:
    """The file of a document's store, which the KV cache lost."""
    known = set(core.worker.files.folder.iterdir())
    answer(core, prompt)
    core.worker.files.flush()
    core.step()
    lose(core)
    (file,) = set(core.worker.files.folder.iterdir()) - known
    return file


def shared_memory() -> int:
    """Regions that this process holds."""
    gc.collect()
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            count += "memfd:kv-eviction" in os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
    return count


def assert_nothing_is_held(core: Any) -> None:
    stores = core.scheduler._stores
    core.finish()
    assert not (
        stores.reads.reading or stores.reads.queued or stores.reads.loading or stores.reads.claims
    )
    assert shared_memory() <= core.regions


@BOTH
def test_a_store_comes_back_from_its_file(setup, tmp_path):
    core = serve(tmp_path, setup)
    saved(core)
    answer(core, DOCUMENT)
    assert counters(core).stores_restored_file == 1 and core.worker.restored == 1
    assert counters(core).stores_published == 1
    assert_nothing_is_held(core)


def cut_short(descriptor, buffers, offset):
    return 0


@pytest.mark.parametrize(
    "fault, stays",
    [
        (raising(OSError, errno.EIO, "Input/output error"), True),
        (raising(OSError, errno.ESTALE, "Stale file handle"), True),
        (raising(MemoryError), True),
        (raising(RuntimeError, "anything"), True),
        (cut_short, False),
    ],
    ids=["EIO", "ESTALE", "MemoryError", "RuntimeError", "cut short"],
)
def test_a_read_that_fails_costs_a_prefill(tmp_path, monkeypatch, clock, fault, stays):
    core = serve(tmp_path)
    file = saved(core)
    monkeypatch.setattr(files_module.os, "preadv", fault)
    answer(core, DOCUMENT)
    assert counters(core).stores_restored_file == 0 and counters(core).stores_published == 2
    assert counters(core).files_refused == (not stays)
    core.worker.files.flush()
    assert file.exists(), "it stayed, or was written again"
    monkeypatch.setattr(files_module.os, "preadv", READ)
    lose(core)
    clock.now += READ_TIMEOUT_S + 1
    answer(core, DOCUMENT)
    assert counters(core).stores_restored_file == 1, "it is looked for again"
    assert_nothing_is_held(core)


def test_without_descriptors_the_file_stays(tmp_path, monkeypatch):
    core = serve(tmp_path)
    file, opened = saved(core), os.open

    def refuse(path, *args, **kwargs):
        if str(path).startswith(str(tmp_path)):
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(files_module.os, "open", refuse)
    answer(core, DOCUMENT)
    assert counters(core).stores_restored_file == 0 == counters(core).files_refused
    assert file.exists()
    assert_nothing_is_held(core)


def test_a_damaged_file_is_removed_and_written_again(tmp_path):
    core = serve(tmp_path)
    file = saved(core)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    answer(core, DOCUMENT)
    assert counters(core).files_refused == 1 and counters(core).stores_restored_file == 0
    core.worker.files.flush()
    # The worker's tags count what it has written.
    tags = [tag_of(unpack(bytearray(content))) for content in (whole, file.read_bytes())]
    assert tags == [0, 1]
    assert_nothing_is_held(core)


def test_a_file_that_vanishes_after_the_check_is_restored_all_the_same(tmp_path):
    core = serve(tmp_path)
    file, stores = saved(core), core.scheduler._stores
    request = core.add(DOCUMENT, 4, asked=ONCE)
    core.hold(free=2)
    deadline = time.monotonic() + 30
    while (
        not any(one.payload for one in stores.reads.reading.values())
        and time.monotonic() < deadline
    ):
        core.step()
        time.sleep(0.001)
    file.unlink()
    core.release()
    while not request.is_finished():
        core.step()
    assert counters(core).stores_restored_file == 1
    assert_nothing_is_held(core)


class Hanging:
    """A file system on which reads do not return before it is back."""

    def __init__(self) -> None:
        self.back = threading.Event()

    def __call__(self, *args: Any) -> int:
        self.back.wait(60)
        return READ(*args)


@BOTH
def test_nobody_waits_longer_than_patience_for_a_file_system_that_hangs(
    setup, tmp_path, monkeypatch, clock
):
    core = serve(tmp_path, setup)
    stores: Any = core.scheduler._stores
    documents = [tokens(130, seed) for seed in range(reads_module.MAX_STORES_READ + 4)]
    for document in documents:
        saved(core, document)
    hanging = Hanging()
    monkeypatch.setattr(files_module.os, "preadv", hanging)
    asked = [core.add(document, 4, asked=ONCE) for document in documents]
    for _ in range(20):
        core.step()
        time.sleep(0.001)
    assert all(request.num_computed_tokens == 0 for request in asked), "they wait"
    other = answer(core, tokens(40, 99))
    assert other.num_output_tokens == 4, "who needs no file does not wait"
    clock.now += READ_TIMEOUT_S + 0.1
    core.finish()
    assert not stores.reads.reading and not stores.reads.queued
    assert counters(core).stores_restored_file == 0
    assert len(stores.reads.hanging) == READERS, "the others were never begun"
    published = counters(core).stores_published
    lose(core)
    clock.now += READ_TIMEOUT_S + 0.1
    core.add(documents[0], 4, asked=ONCE)
    core.step()
    core.settle()
    assert counters(core).stores_published == published + 1, "it did not wait at all"
    core.finish()
    reads = list(stores.reads.hanging)
    hanging.back.set()
    wait(reads, timeout=30)
    assert not stores.reads.all_hang()
    # A future refers to what its thread has read.
    del reads
    monkeypatch.setattr(files_module.os, "preadv", READ)
    lose(core)
    clock.now += READ_TIMEOUT_S + 0.1
    answer(core, documents[1])
    assert counters(core).stores_restored_file == 1, "the file system is back"
    assert_nothing_is_held(core)


def test_a_search_that_hangs_takes_a_thread_too(tmp_path, monkeypatch, clock):
    """A decode server looks for files that a prefill server may still write."""
    core = serve(tmp_path)
    documents = [tokens(130, seed) for seed in range(3)]
    for document in documents[1:]:
        saved(core, document)
    stores, back = core.scheduler._stores, threading.Event()
    monkeypatch.setattr(StoreFiles, "present", lambda *_: back.wait(60) and set())
    core.add(documents[0], 4, asked=ONCE).kv_transfer_params = TAKEN_OVER
    deadline = time.monotonic() + 30
    while stores.reads.search.done() and time.monotonic() < deadline:
        core.step()
        time.sleep(0.001)
    hanging = Hanging()
    monkeypatch.setattr(files_module.os, "preadv", hanging)
    core.add(documents[1], 4, asked=ONCE)
    core.step()
    (reading,) = stores.reads.reading.values()
    while not reading.future.running() and time.monotonic() < deadline:
        time.sleep(0.001)
    del reading
    clock.now += READ_TIMEOUT_S + 0.1
    core.finish()
    assert len(stores.reads.hanging) == 1 and not stores.reads.search.done()
    published = counters(core).stores_published
    core.add(documents[2], 4, asked=ONCE)
    core.step()
    core.settle()
    assert counters(core).stores_published == published + 1, "no thread is left to read its file"
    reads = list(stores.reads.hanging)
    back.set()
    hanging.back.set()
    wait([*reads, stores.reads.search], timeout=30)
    assert not stores.reads.all_hang()
    del reads
    assert_nothing_is_held(core)


def test_a_slow_file_is_waited_for(tmp_path, monkeypatch):
    core = serve(tmp_path)
    saved(core)
    monkeypatch.setattr(files_module, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(files_module.os, "preadv", lambda *args: time.sleep(0.002) or READ(*args))
    answer(core, DOCUMENT)
    assert counters(core).stores_restored_file == 1
    assert_nothing_is_held(core)


def test_what_is_read_is_bounded_by_bytes(tmp_path, monkeypatch):
    """One store is read however large it is, and the others after it."""
    core = serve(tmp_path)
    stores: Any = core.scheduler._stores
    documents = [tokens(130, seed) for seed in range(3)]
    for document in documents:
        saved(core, document)
    monkeypatch.setattr(reads_module, "MAX_READ_BYTES", 1)
    asked = [core.add(document, 4, asked=ONCE) for document in documents]
    most = 0
    for _ in range(2000):
        core.step()
        most = max(most, len(stores.reads.reading) + len(stores.reads.loading))
        time.sleep(0.001)
        if all(request.is_finished() for request in asked):
            break
    assert most == 1 and counters(core).stores_restored_file == 3
    assert_nothing_is_held(core)


class Watch:
    """Counts file operations below a folder by the thread that asks for them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.on, self.seen = str(folder), True, []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        ours = (isinstance(a, (str, Path)) and str(a).startswith(self.folder) for a in args)
        if self.on and any(ours):
            self.seen.append((event, threading.current_thread() is threading.main_thread()))


def test_a_plan_does_not_carry_the_content_of_a_file(tmp_path, monkeypatch):
    """Plans are pickled for every worker; each one maps its own part of the memory instead."""
    core = serve(tmp_path)
    file, copy, sizes = saved(core), TieredStores.copy, []

    def copied(self: TieredStores, plan: StepPlan) -> None:
        copy(self, plan)
        if plan.loads:
            sizes.append(len(pickle.dumps(plan)))

    monkeypatch.setattr(TieredStores, "copy", copied)
    answer(core, DOCUMENT)
    assert counters(core).stores_restored_file == 1
    assert len(sizes) == 1 and sizes[0] < 2000 < file.stat().st_size / 2
    assert_nothing_is_held(core)


@BOTH
def test_the_schedulers_thread_touches_no_file(setup, tmp_path):
    core = serve(tmp_path, setup)
    watch = Watch(tmp_path)
    try:
        for _ in range(2):
            answer(core, DOCUMENT)
            for _ in range(50):
                core.step()
                time.sleep(0.001)
            lose(core)
        assert counters(core).stores_restored_file == 1
    finally:
        watch.on = False
    assert {event for event, _ in watch.seen} >= {"open", "os.rename"}
    assert not [event for event, blocking in watch.seen if blocking]


@pytest.mark.parametrize("memory", [0, 10**9])
def test_a_reset_that_fails_throws_nothing_away(tmp_path, memory):
    core = serve(tmp_path, memory=memory)
    saved(core)
    kept = core.scheduler._stores.kept_bytes
    running = core.add(tokens(40, 5), 50)
    core.step()
    assert core.scheduler.reset_prefix_cache() is False
    assert core.scheduler._stores.kept_bytes == kept
    core.abort(running)
    answer(core, DOCUMENT)
    restored = counters(core).stores_restored_file, counters(core).stores_restored_memory
    assert restored == ((0, 1) if memory else (1, 0))
    assert_nothing_is_held(core)


@BOTH
@pytest.mark.parametrize("memory", [0, 10**9])
def test_after_a_reset_files_of_the_same_weights_are_read(setup, tmp_path, memory):
    """Sleep level 1: memory is empty, files are still right."""
    core = serve(tmp_path, setup, memory)
    saved(core)
    core.reset()
    assert core.scheduler._stores.kept_bytes == 0
    answer(core, tokens(20, 8))
    answer(core, DOCUMENT)
    assert counters(core).stores_restored_memory == 0
    assert counters(core).stores_restored_file == 1
    assert_nothing_is_held(core)


@BOTH
def test_after_a_reset_files_of_other_weights_are_not_read(setup, tmp_path):
    core = serve(tmp_path, setup)
    old = saved(core)
    core.reset()
    core.worker.generation = "other weights"
    answer(core, DOCUMENT)
    core.worker.files.flush()
    core.step()
    lose(core)
    assert counters(core).stores_restored_file == 0
    folders = {file.parent for file in tmp_path.glob("*/*.safetensors")}
    assert len(folders) == 2 and old.exists(), "the old weights' file stays for other servers"
    answer(core, DOCUMENT)
    assert counters(core).stores_restored_file == 1, "the new one is read"
    lose(core)
    core.reset()
    core.worker.generation = ""
    answer(core, tokens(20, 8))
    answer(core, DOCUMENT)
    assert counters(core).stores_restored_file == 2, "and the old one with the old weights"
    assert_nothing_is_held(core)


@BOTH
@pytest.mark.parametrize("late", [False, True], ids=["was read", "is being read"])
def test_what_is_read_when_the_weights_change_is_not_used(setup, tmp_path, monkeypatch, late):
    """Requests wait for the files of two stores during a reset; one of them is not begun yet."""
    core = serve(tmp_path, setup)
    documents = [DOCUMENT, tokens(130, 1)]
    for document in documents:
        saved(core, document)
    stores: Any = core.scheduler._stores
    monkeypatch.setattr(reads_module, "MAX_STORES_READ", 1)
    hanging = Hanging()
    monkeypatch.setattr(files_module.os, "preadv", hanging)
    if not late:
        hanging.back.set()
    core.hold(free=2)
    asked = [core.add(document, 4, asked=ONCE) for document in documents]
    core.step()
    (reading,) = stores.reads.reading.values()
    deadline = time.monotonic() + 30
    while not (reading.future.running() if late else reading.done) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(stores.reads.queued) == 1 and reading.done is not late
    core.release()
    core.reset()
    core.worker.generation = "other weights"
    assert not stores.reads.reading and not stores.reads.queued and reading.abandoned.is_set()
    hanging.back.set()
    wait([reading.future], timeout=30)
    del reading
    core.finish()
    assert all(request.num_output_tokens == 4 for request in asked)
    assert core.worker.restored == 0 and counters(core).stores_restored_file == 0
    assert counters(core).stores_published == 4, "both are computed again"
    assert_nothing_is_held(core)


@pytest.mark.parametrize("setup", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("memory", [0, 10**9])
def test_stores_of_adapters_stay_in_the_cache(setup, tmp_path, memory):
    core = serve(tmp_path, setup, memory)
    adapter = LoRARequest("mine", 1, str(tmp_path / "adapter"))
    answer(core, DOCUMENT, lora_request=adapter)
    assert counters(core).stores_published == 1 and counters(core).stores_saved == 0
    answer(core, DOCUMENT, lora_request=adapter)
    assert counters(core).stores_reused == 1, "vLLM's prefix cache shares them"
    lose(core)
    replaced = LoRARequest("mine", 2, str(tmp_path / "adapter"), load_inplace=True)
    answer(core, DOCUMENT, lora_request=replaced)
    assert counters(core).stores_published == 2 and core.worker.restored == 0
    assert_nothing_is_held(core)


def handed_over(core: Any, prompt: list[int]) -> bool:
    given = {"do_remote_decode": True, "do_remote_prefill": False}
    request = answer(core, prompt, 1, given)
    core.worker.files.flush()
    core.step()
    core.settle()
    return request.request_id in core.handed_over


def test_stores_that_cannot_be_written_are_not_handed_over(tmp_path, monkeypatch):
    core = serve(tmp_path)
    assert handed_over(core, DOCUMENT), "it is being written"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    written = os.write
    monkeypatch.setattr(files_module.os, "write", full)
    handed_over(core, tokens(130, 1))
    assert not handed_over(core, tokens(130, 1)), "its own store could not be written"
    assert not handed_over(core, tokens(130, 2)), "nor will the next one"
    assert handed_over(core, DOCUMENT), "this one is there"
    monkeypatch.setattr(files_module.os, "write", written)
    handed_over(core, tokens(130, 3))
    assert handed_over(core, tokens(130, 4)), "there is room again"
    assert not core.scheduler._stores._writing


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0], ids=["slow", "fast"])
def test_a_late_file_is_waited_for_by_this_servers_clock(tmp_path, clock, skew_s):
    """Whatever the clocks of the other server and of the client say."""
    core = serve(tmp_path)
    start = clock.now
    request = core.add(DOCUMENT, 4, asked=ONCE)
    request.kv_transfer_params, request.arrival_time = TAKEN_OVER, time.time() + skew_s
    while not request.num_computed_tokens:
        assert clock.now < start + 10 * HANDOVER_TIMEOUT_S, "it waits for ever"
        core.step()
        time.sleep(0.001)
        clock.now += 0.1
    assert HANDOVER_TIMEOUT_S <= clock.now - start < 1.5 * HANDOVER_TIMEOUT_S
    core.finish()
    assert_nothing_is_held(core)


def test_no_store_is_copied_for_a_request_that_is_not_admitted(tmp_path):
    """The watermark keeps it out while another one runs."""
    core = serve(tmp_path, memory=10**9, watermark=0.3)
    saved(core)
    running = core.add(tokens(40, 5), 100, asked={"kv_eviction": "none"})
    core.step()
    waiting = core.add(DOCUMENT, 4, asked=ONCE)
    core.hold(free=20)
    for _ in range(5):
        core.step()
    assert core.worker.restored == 0 and waiting.num_computed_tokens == 0
    core.release()
    core.step()
    core.settle()
    assert core.worker.restored == 1 and not running.is_finished()
    core.finish()


def test_one_line_says_that_files_cannot_be_read(tmp_path, monkeypatch, clock, caplog):
    core = serve(tmp_path)
    for seed in range(3):
        saved(core, tokens(130, seed))
    monkeypatch.setattr(
        files_module.os, "preadv", raising(OSError, errno.EIO, "Input/output error")
    )
    for seed in range(3):
        answer(core, tokens(130, seed))
    lines = [r for r in caplog.records if "not read from files" in r.getMessage()]
    assert len(lines) == 1 and lines[0].levelno == logging.WARNING

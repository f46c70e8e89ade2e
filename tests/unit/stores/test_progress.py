"""Reading and writing files leaves the interpreter to other threads, so no step waits for it."""

import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvevict.stores import files as files_module
from vllm_kvevict.stores.files import StoreFiles

LAYERS, LAYER_BYTES = 3, 32 << 20
NAME = "a" * 40
NEVER_S = 1000.0
"""A thread that computes never gives up the interpreter, unless a call releases it."""
ELSEWHERE = 0.2
"""Largest part of the processor time of a read or write outside the calls that handle bytes."""


class Calls:
    """Calls that handle many bytes, and those in which another thread was seen to run.

    ``running`` is the number of the call in progress. Another thread that finds it set runs Python
    code during this call, and therefore the call has released the interpreter.
    """

    def __init__(self) -> None:
        self.running: int | None = None
        self.kinds: list[str] = []
        self.bytes = 0
        self.seconds = 0.0
        self.seen: set[int] = set()

    def watch(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            size = sum(memoryview(part).nbytes for part in args[-1:] if not isinstance(part, int))
            size += sum(part.nbytes for arg in args if isinstance(arg, list) for part in arg)
            if size < 1 << 20:
                return call(*args)
            self.kinds.append(kind)
            self.bytes += size
            begin = time.thread_time()
            self.running = len(self.kinds) - 1
            result = call(*args)
            self.running = None
            self.seconds += time.thread_time() - begin
            return result

        return watched

    def of_kind(self, kind: str) -> tuple[int, int]:
        """Number of calls, and of those in which another thread ran."""
        numbers = {n for n, one in enumerate(self.kinds) if one == kind}
        return len(numbers), len(numbers & self.seen)


@pytest.fixture
def calls(monkeypatch) -> Iterator[Calls]:
    calls, sha256 = Calls(), files_module.sha256

    def hashed(*args: Any) -> Any:
        checksum = sha256(*args)
        return SimpleNamespace(
            update=calls.watch("hash", checksum.update), hexdigest=checksum.hexdigest
        )

    monkeypatch.setattr(files_module, "sha256", hashed)
    for name in ("write", "preadv"):
        monkeypatch.setattr(
            files_module.os, name, calls.watch(name, getattr(files_module.os, name))
        )
    interval = sys.getswitchinterval()
    sys.setswitchinterval(NEVER_S)
    yield calls
    sys.setswitchinterval(interval)


def watched(calls: Calls, work: Callable[[], Any]) -> Any:
    """Do ``work`` on a thread, and return its result; this thread looks at the calls meanwhile."""
    done: list[Any] = []
    seconds = 0.0

    def run() -> None:
        nonlocal seconds
        begin = time.thread_time()
        done.append(work())
        seconds = time.thread_time() - begin

    tracemalloc.start()
    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        if (number := calls.running) is not None:
            calls.seen.add(number)
        time.sleep(0.0002)
    thread.join()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20, "the interpreter copied the store"
    assert calls.seconds > (1 - ELSEWHERE) * seconds
    return done[0]


def test_other_threads_run_while_a_store_is_written_and_read(tmp_path, calls):
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"0.{layer}.pages": torch.randint(
            0, 256, (64, LAYER_BYTES // 64), dtype=torch.uint8, generator=generator
        )
        for layer in range(LAYERS)
    }
    files, total = StoreFiles(tmp_path, {"model": "a"}), LAYERS * LAYER_BYTES
    watched(calls, lambda: files.write(NAME, 0, tensors))
    assert calls.bytes == 2 * total, "each byte is hashed once and written once"
    region = watched(calls, lambda: files.read(NAME, 0, total))
    assert 4 * total <= calls.bytes < 4 * total + (1 << 20)
    assert files_module.unpack(region.map()).keys() == tensors.keys()
    for kind in ("hash", "write", "preadv"):
        count, seen = calls.of_kind(kind)
        assert count >= LAYERS and seen > count // 3, f"{kind}: {seen} of {count} calls"

"""A folder of stores on a file system that fails at random, one draw after the other.

The calls that threads would make run between the steps of the engine, so that one seed gives one
sequence of events. Files are real; of their content, only names, shapes and a tag are.
"""

import errno
import logging
import os
import random
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from vllm_kvevict.engine import chain_searches, store_reads, tiered_stores
from vllm_kvevict.engine.store_reads import READERS
from vllm_kvevict.rules.step_plan import StoreCopy
from vllm_kvevict.stores.files import StoreFiles
from vllm_kvevict.stores.host import StoreNews
from vllm_kvevict.stores.shape import GroupShape, StoreSizes
from vllm_kvevict.stores.threads import Threads

SECONDS_A_STEP = 1.0
HANG_S = 40.0
TAG_BYTES = 8
FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None


def raising(error: type[BaseException], *about: Any) -> Callable[..., Any]:
    """A function that raises an error whatever it is given."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error(*about)

    return fail


def number(code: int) -> Callable[..., Any]:
    return raising(OSError, code, os.strerror(code))


FAULTS: list[tuple[str, Callable[..., Any]]] = [
    ("preadv", number(errno.EIO)),
    ("preadv", number(errno.ESTALE)),
    ("preadv", raising(MemoryError)),
    ("preadv", lambda *args: 0),
    ("memfd_create", number(errno.EMFILE)),
    ("open", number(errno.EMFILE)),
    ("open", number(errno.EACCES)),
    ("write", number(errno.ENOSPC)),
    ("write", number(errno.EDQUOT)),
    ("replace", number(errno.EROFS)),
    ("unlink", number(errno.EPERM)),
    ("utime", number(errno.EROFS)),
]
"""Functions of :mod:`os` that fail for the duration of one call."""


class Deferred(Threads):
    """Calls that take some steps each, some of them longer than anybody waits, and may fail.

    Args:
        disk: The file system.
        count: Number of calls under way at once.

    """

    def __init__(self, disk: "FaultyDisk", count: int) -> None:
        super().__init__(count, "")
        self._disk = disk
        self._waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._begun: list[tuple[float, Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, work, args))
        return future

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._begun

    def run(self) -> None:
        """Begin the calls that threads have time for, and end those whose time has come."""
        disk = self._disk
        while self._waiting and len(self._begun) < self.count:
            future, work, args = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                self._begun.append((disk.now + disk.duration(), future, work, args))
        begun, self._begun = self._begun, []
        for end, future, work, args in begun:
            if end > disk.now:
                self._begun.append((end, future, work, args))
                continue
            with disk.fault():
                try:
                    result = work(*args)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)


class FaultyDisk:
    """Puts the stores of an engine into files, too.

    Args:
        core: The engine, with stores outside the KV cache.
        faults: Share of the calls that fail, and of the steps in which a file is damaged.
        rng: Draws everything that happens.

    """

    def __init__(self, core: Any, faults: float, rng: random.Random) -> None:
        self._core, self._faults, self._rng = core, faults, rng
        self.now = 1000.0
        self.hung = self.failed = self.damaged = self.generations = self.unloaded = 0
        folder = Path(tempfile.mkdtemp(prefix="kv-eviction-test", dir=FOLDER))
        self._root = folder / "stores"
        self._away = folder / "away"
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._stores = core.scheduler._stores
        self._stores.reads.files = StoreFiles(self._root, {"model": "a"})
        core.worker.files = StoreFiles(self._root, {"model": "a"})
        core.worker.tensors = tensors_for(self._stores._sizes)
        core.worker.cannot_load = self._cannot_load
        self._threads = [Deferred(self, READERS), Deferred(self, 1)]
        self._stores.reads.threads, core.worker.files._writer = self._threads

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Within this context the engine's time is that of the steps, and it logs no warning."""
        log = logging.getLogger("vllm.kv_eviction.tiers")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            with ExitStack() as stack:
                for module in (store_reads, tiered_stores, chain_searches):
                    stack.enter_context(mock.patch.object(module, "monotonic", lambda: self.now))
                yield
        finally:
            log.setLevel(level)

    def duration(self) -> float:
        """Seconds until a call ends."""
        if self._rng.random() < self._faults / 4:
            self.hung += 1
            return HANG_S
        return self._rng.choice([0.0, 0.0, 1.0, 3.0]) if self._faults else 0.0

    def _cannot_load(self, name: str) -> bool:
        """Whether a rank fails to load a store that was read and checked."""
        cannot = self._rng.random() < self._faults / 2
        self.unloaded += cannot
        return cannot

    @contextmanager
    def fault(self) -> Iterator[None]:
        """One of the functions of the operating system may fail in this context."""
        with ExitStack() as stack:
            if self._rng.random() < self._faults:
                self.failed += 1
                stack.enter_context(mock.patch.object(os, *self._rng.choice(FAULTS)))
            yield

    def step(self) -> None:
        """Let a step's time pass."""
        self.now += SECONDS_A_STEP
        for threads in self._threads:
            threads.run()
        if self._rng.random() < self._faults / 4:
            self.damaged += 1
            self._damage()

    def _damage(self) -> None:
        """Change, cut, replace or remove a file, or the whole folder until the next time."""
        rng = self._rng
        if self._away.exists():
            shutil.rmtree(self._root, ignore_errors=True)
            self._away.rename(self._root)
            return
        files = sorted(self._root.glob("*/*.safetensors"))
        if not files or rng.random() < 0.1:
            self._root.rename(self._away)
            return
        file = rng.choice(files)
        kind = rng.choice(["flip", "flip", "cut", "empty", "garbage", "swap", "vanish", "folder"])
        if file.is_dir():
            file.rmdir()
        elif kind == "vanish":
            file.unlink()
        elif kind == "folder":
            file.unlink()
            file.mkdir()
        else:
            content = bytearray(file.read_bytes())
            if kind == "flip" and content:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            elif kind == "cut":
                del content[rng.randrange(len(content) + 1) :]
            elif kind == "garbage":
                content = bytearray(rng.randbytes(rng.randrange(1, 400)))
            elif kind == "swap" and not (other := rng.choice(files)).is_dir():
                content = bytearray(other.read_bytes())
            file.write_bytes(content if kind != "empty" else b"")

    def change_weights(self) -> None:
        """Load the other one of two sets of weights, which a reset follows."""
        self._core.settle()
        worker = self._core.worker
        worker.generation = "" if worker.generation else "other weights"
        self.generations += 1

    def check_idle(self) -> None:
        """No call, no memory and no record is left once no request is."""
        self._faults, self.now = 0.0, self.now + HANG_S
        while not all(threads.idle for threads in self._threads):
            self.step()
        stores, files = self._stores, self._core.worker.files
        stores.executed(None, [StoreNews(files.results())])
        assert not stores.reads.reading and not stores.reads.queued and not stores.reads.loading
        assert not stores.reads.claims and not stores._writing
        assert not files._waiting, "bytes that wait to be written are counted for ever"
        assert not stores.reads.all_hang() and not stores.reads.hanging
        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors()]
        assert not [name for name in held if "memfd:kv-eviction" in name]
        assert not list(self._root.glob("*/.*")), "unfinished files"


def descriptors() -> list[str]:
    """Open descriptors of this process, without that of the listing."""
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def tensors_for(sizes: StoreSizes) -> Callable[[StoreCopy, int], dict[str, torch.Tensor]]:
    """Returns a function that makes tensors of a store's shapes with a tag in them.

    All heads share the pages equally, and all other values are 0.
    """

    def tensors(copy: StoreCopy, tag: int) -> dict[str, torch.Tensor]:
        shapes = {one.group_id: GroupShape(0, len(one.store), len(one.tail)) for one in copy.groups}
        made = {
            name: torch.zeros(shape, dtype=dtype)
            for name, (shape, dtype) in sizes._expected(shapes).items()
        }
        for group, shape in shapes.items():
            if shape.store:
                heads = sizes.specs[group].num_kv_heads
                made[f"{group}.split"][:] = torch.arange(heads + 1) * shape.store
        pages = next(made[name] for name in sorted(made) if name.endswith(".pages"))
        data = torch.frombuffer(bytearray(tag.to_bytes(TAG_BYTES, "little")), dtype=torch.uint8)
        pages.view(-1)[:TAG_BYTES] = data
        return made

    return tensors


def tag_of(tensors: dict[str, torch.Tensor]) -> int:
    """The tag of the tensors of a store, which have not changed otherwise."""
    split = [tensor for name, tensor in tensors.items() if name.endswith(".split")]
    others = [tensors[name] for name in sorted(tensors) if not name.endswith(".split")]
    pages = next(tensor for tensor in others if tensor.dtype == torch.uint8)
    tag = bytes(pages.view(-1)[:TAG_BYTES].tolist())
    assert sum(int(tensor.sum(dtype=torch.int64)) for tensor in others) == sum(tag)
    assert all(bool((one.diff(dim=1) == one[:, 1:2]).all()) for one in split)
    return int.from_bytes(tag, "little")

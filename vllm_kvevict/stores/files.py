"""Files of published stores: one for each rank, whole or not there, and never believed unread."""

import json
import os
import re
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from time import time

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from vllm.logger import init_logger

Tensors = dict[str, torch.Tensor]

logger = init_logger("vllm.kv_eviction.tiers")

SUFFIX = ".safetensors"
OURS = re.compile(r"[0-9a-f]{16}/[0-9a-f]{40}\.[0-9]+\.safetensors")
"""Names of files that count and may be removed; whatever else is in the folder stays."""

MOST_WAITING_BYTES = 2**30
"""What stores that wait to be written hold of host memory; a further one is not written."""

UNFINISHED_S = 3600
"""Seconds after which nobody writes to a file any more that was not moved into place."""


class StoreFiles:
    """A folder of stores that servers with equal fingerprints may share.

    A file is a safetensors file whose metadata says what it is and what its tensors' digest is. It
    is written under another name and moved into place, so that a reader finds all of it or nothing.
    The folder is trusted as far as its permissions go: who may write there may change answers.

    Args:
        folder: Where the files are; made if it is not there, for this user only.
        fingerprint: What must be the same for two servers to share a store, by name.
        most_bytes: What the files of the folder may take together; those used longest ago go.

    """

    def __init__(
        self, folder: Path, fingerprint: dict[str, object], most_bytes: int | None = None
    ) -> None:
        text = json.dumps(fingerprint, sort_keys=True, default=str)
        self.fingerprint = sha256(text.encode()).hexdigest()
        self.folder = folder / self.fingerprint[:16]
        self._root = folder
        self._most_bytes = most_bytes
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-eviction-store-writer")
        self._lock, self._waiting = Lock(), 0
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Remove what servers that were killed had begun to write."""
        for path in self.folder.glob(".*"):
            with suppress(OSError):
                if time() - path.stat().st_mtime > UNFINISHED_S:
                    path.unlink()

    def path(self, name: str, rank: int) -> Path:
        """Where the store called ``name`` is for a rank."""
        return self.folder / f"{name}.{rank}{SUFFIX}"

    def write_soon(self, name: str, rank: int, tensors: Tensors, ready: Callable[[], None]) -> None:
        """Write a store behind the caller's back, once ``ready`` returns."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with self._lock:
            # One alone is written however large it is.
            if self._waiting and self._waiting + num_bytes > MOST_WAITING_BYTES:
                return
            self._waiting += num_bytes
        self._writer.submit(self._write, name, rank, tensors, ready)

    def _write(self, name: str, rank: int, tensors: Tensors, ready: Callable[[], None]) -> None:
        try:
            if not self.path(name, rank).exists():
                ready()
                self.write(name, rank, tensors)
                self.trim()
        except OSError as error:
            logger.warning_once("KV eviction: a store was not written to a file: %s", error)
        finally:
            with self._lock:
                self._waiting -= sum(tensor.nbytes for tensor in tensors.values())

    def write(self, name: str, rank: int, tensors: Tensors) -> None:
        """Write a store.

        Raises:
            OSError: The folder cannot be written to, or is full.

        """
        about = {"fingerprint": self.fingerprint, "name": name, "rank": str(rank)}
        data = save(tensors, about | {"sha256": digest(tensors, about)})
        with NamedTemporaryFile(dir=self.folder, prefix=".", delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.replace(file.name, self.path(name, rank))
            except BaseException:
                os.unlink(file.name)
                raise

    def read(self, name: str, rank: int, most_bytes: int) -> bytes:
        """A store's file, checked.

        Args:
            name: The store's.
            rank: Whose part of it.
            most_bytes: Its tensors take no more than that.

        Raises:
            FileNotFoundError: It is not there.
            ValueError: It is not a whole file of this store, rank and fingerprint.
            OSError: It cannot be read.

        """
        descriptor = os.open(self.path(name, rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes + HEADER_BYTES:
                raise ValueError("it is no file, or too large")
            data = file.read(most_bytes + HEADER_BYTES + 1)
            about = metadata(data)
            said = about.pop("sha256", None)
            if about != {"fingerprint": self.fingerprint, "name": name, "rank": str(rank)}:
                raise ValueError("it holds something else")
            try:
                found = digest(unpack(data), about)
            except RuntimeError as error:
                raise ValueError(f"it holds no store: {error}") from error
            if found != said:
                raise ValueError("it is damaged")
            # Not where the folder is mounted read-only, or the file is another user's.
            with suppress(OSError):
                os.utime(descriptor)
        return data

    def present(self, names: Iterable[str], ranks: int) -> set[str]:
        """Stores whose files are there for all ranks."""
        every = range(ranks)
        return {n for n in names if all(os.path.exists(self.path(n, rank)) for rank in every)}

    def remove(self, name: str, ranks: int) -> None:
        """Remove a store's files, as far as they are there and may be removed."""
        for rank in range(ranks):
            try:
                self.path(name, rank).unlink(missing_ok=True)
            except OSError:
                continue

    def trim(self) -> None:
        """Remove the files that were used longest ago until the rest are small enough."""
        if self._most_bytes is None:
            return
        found = []
        for path in self._root.glob(f"*/*{SUFFIX}"):
            if not OURS.fullmatch(path.relative_to(self._root).as_posix()):
                continue
            try:
                found.append(((status := path.stat()).st_mtime, status.st_size, path))
            except FileNotFoundError:
                continue
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    def flush(self) -> None:
        """Wait until everything is written that was given."""
        self._writer.submit(lambda: None).result()


HEADER_BYTES = 1 << 20
"""More than the header of a store with a thousand layers takes."""


def metadata(data: bytes) -> dict[str, str]:
    """What a safetensors file says of itself.

    Raises:
        ValueError: It is none.

    """
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= min(len(data) - 8, HEADER_BYTES):
        raise ValueError("it is no safetensors file")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise ValueError("it is no safetensors file") from error
    about = header.get("__metadata__") if isinstance(header, dict) else None
    return dict(about) if isinstance(about, dict) else {}


def unpack(data: bytes) -> Tensors:
    """The tensors of a file.

    Raises:
        ValueError: It is none.

    """
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(f"it is no safetensors file: {error}") from error


def digest(tensors: Tensors, about: dict[str, str]) -> str:
    """SHA-256 over tensors, their names, types and shapes, and what is said about them."""
    found = sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(memoryview(tensor.contiguous().view(torch.uint8).numpy()))
    return found.hexdigest()

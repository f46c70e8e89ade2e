"""Files of published stores, one per rank. They are written atomically and verified when read."""

import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from math import prod
from pathlib import Path
from threading import Lock
from time import monotonic, sleep
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_kvevict.stores.folder import (
    SUFFIX,
    UNFINISHED,
    FolderSpace,
    check_owner,
    check_trusted,
    no_folder,
)
from vllm_kvevict.stores.region import Region
from vllm_kvevict.stores.threads import Threads

Tensors = dict[str, torch.Tensor]

logger = init_logger("vllm.kv_eviction.tiers")

MAX_WAITING_BYTES = 2**30
"""Maximum bytes of host memory of stores that wait to be written; further stores are not
written."""

PEER_TIMEOUT_S = 2.0
"""Maximum seconds that the first rank waits for the parts of a store that other ranks write."""

PEER_INTERVAL_S = 0.02
"""Seconds between two looks at these parts."""

WARNING_INTERVAL_S = 600.0
"""Seconds between two log lines about a folder that cannot be written to."""

FLUSH_TIMEOUT_S = 10.0
"""Maximum seconds that a server that shuts down waits for stores to be written."""

CHUNK_BYTES = 16 << 20
"""Bytes per system call. An abandoned read ends after the current one."""

MAX_HEADER_BYTES = 1 << 20
"""Maximum size of a header in bytes, more than the header of a store with a thousand layers."""

ALIGNMENT_BYTES = 64
DTYPES = {"U8": torch.uint8, "I32": torch.int32, "F32": torch.float32}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class StoreFiles:
    """A folder of stores that servers with equal fingerprints may share.

    A file is a safetensors file. Its metadata has the name of the store and a digest of the
    tensors. It is written under a temporary name and then renamed, so that a reader finds the whole
    file or none. Reading and writing release the GIL while they copy and hash. Apart from the
    constructor, a method accesses the file system on the calling thread only if its docstring says
    so. The folder is trusted as far as its permissions allow: users with write access may change
    answers.

    Args:
        folder: Folder of the files; created with access for this user only if it does not exist.
        fingerprint: Values that must be equal for two servers to share a store, by name.
        max_bytes: Maximum bytes of all files in the folder, those of other servers and unfinished
            ones included; the least recently used are removed first. None for half of the space
            that is free or holds stores when the folder is first listed.
        ranks: Number of ranks of the server. The first one limits the size of the folder, and
            reports whether the parts of all ranks were written.

    Raises:
        ValueError: The folder cannot be trusted or created; the message is one sentence.

    """

    def __init__(
        self,
        folder: Path,
        fingerprint: dict[str, object],
        max_bytes: int | None = None,
        ranks: int = 1,
    ) -> None:
        self._text = json.dumps(fingerprint, sort_keys=True, default=str)
        self._root = folder
        self._ranks = ranks
        self._space = FolderSpace(folder, max_bytes)
        self.use("")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(no_folder(folder, error.strerror)) from error
        check_owner(folder)
        # A folder that is mounted read-only can only have files of other servers.
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.exists():
            check_owner(self.folder)
        self._writer = Threads(1, "kv-eviction-store-writer")
        self._lock, self._waiting = Lock(), 0
        self._results: dict[str, bool] = {}
        self._warn_at = 0.0
        self._space.remove_unfinished(self.folder)

    def use(self, generation: str) -> None:
        """Read and write stores of different weights from now on.

        Args:
            generation: Checksum of the weights in memory; empty for those of the fingerprint.

        """
        self.fingerprint = sha256((self._text + generation).encode()).hexdigest()
        self.folder = self._root / self.fingerprint[:16]

    def path(self, name: str, rank: int) -> Path:
        """Return the path of the store ``name`` of a rank."""
        return self.folder / f"{name}.{rank}{SUFFIX}"

    def write_soon(self, name: str, rank: int, tensors: Tensors, ready: Callable[[], None]) -> None:
        """Write a store on a thread, once ``ready`` returns; :meth:`results` returns the
        outcome."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with self._lock:
            # A single store is written even if it is larger.
            if self._waiting and self._waiting + num_bytes > MAX_WAITING_BYTES:
                self._results[name] = False
                return
            self._waiting += num_bytes
        about = {"fingerprint": self.fingerprint, "name": name, "rank": str(rank)}
        self._writer.submit(self._write, self.path(name, rank), about, tensors, ready)

    def _write(
        self, path: Path, about: dict[str, str], tensors: Tensors, ready: Callable[[], None]
    ) -> None:
        written = False
        try:
            if not path.exists():
                ready()
                self._write_to(path, about, tensors)
            if about["rank"] == "0":
                # The parts of the ranks are equally large.
                num_bytes = sum(tensor.nbytes for tensor in tensors.values())
                self._space.written(num_bytes * self._ranks)
                written = self._all_written(about["name"])
            else:
                written = True
        except Exception as error:
            # Neither the error nor its traceback is kept, because the traceback holds the tensors.
            self._warn(getattr(error, "strerror", None) or type(error).__name__)
        finally:
            with self._lock:
                self._waiting -= sum(tensor.nbytes for tensor in tensors.values())
                self._results[about["name"]] = written

    def _warn(self, reason: str) -> None:
        """Log that writing fails, at most once per interval for the whole folder."""
        if monotonic() >= self._warn_at:
            self._warn_at = monotonic() + WARNING_INTERVAL_S
            logger.warning(
                "KV eviction: a store was not written to a file in %s: %s.", self._root, reason
            )

    def _all_written(self, name: str) -> bool:
        """Wait for the other ranks' parts of a store; return whether all of them exist.

        Only the first rank's report reaches the scheduler.
        """
        until = monotonic() + (PEER_TIMEOUT_S if self._ranks > 1 else 0)
        while not self.present([name], self._ranks):
            if monotonic() >= until:
                if self._ranks > 1:
                    self._warn("the parts of other ranks are missing")
                return False
            sleep(PEER_INTERVAL_S)
        return True

    def results(self) -> dict[str, bool]:
        """Return for each store given to :meth:`write_soon` whether its file exists, since the last
        call.

        A store that already had a file counts as written; a store that was dropped does not. The
        first rank reports True only if the files of all ranks exist.
        """
        with self._lock:
            results, self._results = self._results, {}
        return results

    def write(self, name: str, rank: int, tensors: Tensors) -> None:
        """Write a store on the calling thread.

        Raises:
            OSError: The folder cannot be written to, or is full.

        """
        about = {"fingerprint": self.fingerprint, "name": name, "rank": str(rank)}
        self._write_to(self.path(name, rank), about, tensors)

    def _write_to(self, path: Path, about: dict[str, str], tensors: Tensors) -> None:
        # The parents are not created: a volume that is no longer mounted must not be written to.
        path.parent.mkdir(mode=0o700, exist_ok=True)
        check_trusted(path.parent)
        metadata = about | {"sha256": digest(tensors, about)}
        header = json.dumps({"__metadata__": metadata, **_entries(tensors)}).encode()
        header += b" " * (-(8 + len(header)) % ALIGNMENT_BYTES)
        descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=UNFINISHED)
        try:
            try:
                _write_all(descriptor, memoryview(len(header).to_bytes(8, "little") + header))
                for part in _data(tensors):
                    _write_all(descriptor, part)
            finally:
                os.close(descriptor)
            os.replace(unfinished, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise

    def read(
        self,
        name: str,
        rank: int,
        max_bytes: int,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Region:
        """Read a store's file on the calling thread, and check it.

        Args:
            name: The name of the store.
            rank: The rank that the part belongs to.
            max_bytes: Maximum bytes of its tensors.
            wanted: Called after each chunk; if it returns False, the read ends.

        Returns:
            A copy of the file in shared memory.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: The file is not a complete file of this store, rank and fingerprint.
            OSError: The file cannot be read, other users control its folder, or the read was
                abandoned.

        """
        check_trusted(self.folder)
        expected = {"fingerprint": self.fingerprint, "name": name, "rank": str(rank)}
        descriptor = os.open(self.path(name, rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            size = status.st_size
            if not stat.S_ISREG(status.st_mode) or size > max_bytes + MAX_HEADER_BYTES:
                raise ValueError("it is not a regular file, or is too large")
            if size < 8:
                raise ValueError("it is not a safetensors file")
            region = Region(size)
            buffer = memoryview(region.map())
            done = 0
            while done < size:
                if not wanted():
                    raise OSError("the read was abandoned")
                count = os.preadv(descriptor, [buffer[done : done + CHUNK_BYTES]], done)
                if not count:
                    raise ValueError("it became shorter while it was read")
                done += count
            verify(buffer, expected)
            # Fails if the folder is mounted read-only, or if the file belongs to another user.
            with suppress(OSError):
                os.utime(descriptor)
        finally:
            os.close(descriptor)
        return region

    def present(self, names: Iterable[str], ranks: int) -> set[str]:
        """Return the stores that have files for all ranks; accesses the files on the calling
        thread."""
        every = range(ranks)
        return {n for n in names if all(os.path.exists(self.path(n, rank)) for rank in every)}

    def remove(self, name: str, ranks: int) -> None:
        """Remove a store's files on the calling thread, if permissions allow it."""
        for rank in range(ranks):
            with suppress(OSError):
                self.path(name, rank).unlink(missing_ok=True)

    def announce_limit(self) -> None:
        """Log the default limit, if there is no other; accesses the folder on the calling
        thread."""
        self._space.announce()

    def trim(self) -> None:
        """Remove the least recently used files until the rest are small enough, on the calling
        thread."""
        self._space.trim()

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Wait until all stores given so far are written, for at most ``timeout_s`` seconds."""
        with suppress(TimeoutError):
            self._writer.submit(lambda: None).result(timeout_s)


def _in_order(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in the order of a file: larger types first, so that each is aligned."""
    return sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))


def _entries(tensors: Tensors) -> dict[str, Any]:
    """Return the header of a safetensors file without its metadata."""
    entries, end = {}, 0
    for name, tensor in _in_order(tensors):
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    return entries


def _data(tensors: Tensors) -> Iterator[memoryview]:
    """Yield the bytes of all tensors, in the order of the file."""
    for _, tensor in _in_order(tensors):
        yield memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:CHUNK_BYTES]) :]


def _digest(about: dict[str, str], entries: dict[str, Any], data: Iterable[memoryview]) -> str:
    checksum = sha256(json.dumps([about, entries], sort_keys=True).encode())
    for part in data:
        checksum.update(part)
    return checksum.hexdigest()


def digest(tensors: Tensors, about: dict[str, str]) -> str:
    """Return SHA-256 over tensors, their names, types and shapes, and their file's metadata."""
    return _digest(about, _entries(tensors), _data(tensors))


def verify(buffer: memoryview, expected: dict[str, str]) -> None:
    """Check a file's content.

    Args:
        buffer: The content.
        expected: Its metadata, except the digest.

    Raises:
        ValueError: It is not a complete file with this metadata.

    """
    about, entries, begin = _parse(buffer)
    said = about.pop("sha256", None)
    if about != expected:
        raise ValueError("it holds a different store")
    if _digest(about, entries, [buffer[begin:]]) != said:
        raise ValueError("it is damaged")


def _parse(buffer: memoryview) -> tuple[dict[str, str], dict[str, Any], int]:
    """Read the header of a safetensors file.

    Returns:
        Its metadata; the types, shapes and offsets of its tensors; and the offset of the first
        tensor.

    Raises:
        ValueError: It is not such a file, or has tensors that no store has.

    """
    length = int.from_bytes(buffer[:8], "little")
    if not 2 <= length <= min(len(buffer) - 8, MAX_HEADER_BYTES):
        raise ValueError("it is not a safetensors file")
    try:
        entries = json.loads(bytes(buffer[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise ValueError("it is not a safetensors file") from error
    about = entries.pop("__metadata__", None) if isinstance(entries, dict) else None
    if not isinstance(about, dict):
        raise ValueError("it is not a safetensors file of a store")
    begin = 8 + length
    if not all(_is_store_tensor(entry, begin, len(buffer) - begin) for entry in entries.values()):
        raise ValueError("it does not hold a store")
    return about, entries, begin


def _is_store_tensor(entry: Any, begin: int, size: int) -> bool:
    """Return whether an entry of a header describes a valid tensor of a store within ``size``
    bytes."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return False
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        return False
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [-1]
    if any(type(number) is not int or number < 0 for number in numbers):
        return False
    if not shape or 0 in shape or len(offsets) != 2 or offsets[1] > size:
        return False
    itemsize = DTYPES[code].itemsize
    aligned = (begin + offsets[0]) % itemsize == 0
    return aligned and offsets[1] - offsets[0] == prod(shape) * itemsize


def unpack(buffer: Any) -> Tensors:
    """Return the tensors of a file's content, which share its memory.

    Args:
        buffer: The content: a writable buffer.

    Raises:
        ValueError: It is not a file of a store.

    """
    _, entries, begin = _parse(memoryview(buffer))
    return {
        name: torch.frombuffer(
            buffer,
            dtype=DTYPES[entry["dtype"]],
            count=prod(entry["shape"]),
            offset=begin + entry["data_offsets"][0],
        ).view(entry["shape"])
        for name, entry in entries.items()
    }

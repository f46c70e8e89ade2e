"""Files of published stores, one per rank. They are written atomically and verified when read."""

import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from math import prod
from pathlib import Path
from threading import Lock
from time import monotonic, time
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_kvevict.stores.region import Region
from vllm_kvevict.stores.threads import Threads

Tensors = dict[str, torch.Tensor]

logger = init_logger("vllm.kv_eviction.tiers")

SUFFIX = ".safetensors"
OURS = re.compile(r"[0-9a-f]{16}/[0-9a-f]{40}\.[0-9]+\.safetensors")
"""Names of files that count and may be removed; whatever else is in the folder stays."""

MOST_WAITING_BYTES = 2**30
"""What stores that wait to be written hold of host memory; a further one is not written."""

UNFINISHED_S = 3600
"""Seconds after which nobody writes to a file any more that was not moved into place."""

WARN_EVERY_S = 600.0
"""Seconds between two log lines about one folder that cannot be written to."""

FLUSH_S = 10.0
"""Seconds that the end of a server waits for stores to be written."""

CHUNK_BYTES = 16 << 20
"""Bytes of one system call: after each, a read that nobody waits for any more ends."""

HEADER_BYTES = 1 << 20
"""More than the header of a store with a thousand layers takes."""

ALIGNMENT = 64
DTYPES = {"U8": torch.uint8, "I32": torch.int32, "F32": torch.float32}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class StoreFiles:
    """A folder of stores that servers with equal fingerprints may share.

    A file is a safetensors file. Its metadata names the store and holds a digest of the tensors. It
    is written under a temporary name and moved into place, so that a reader finds all of it or
    nothing. Reading and writing release the GIL while they copy and hash, and no method except the
    constructor touches the file system on the calling thread if its docstring does not say so.
    The folder is trusted as far as its permissions go: who may write there may change answers.

    Args:
        folder: Where the files are; made for this user only if it does not exist.
        fingerprint: What must be the same for two servers to share a store, by name.
        most_bytes: What the files of the folder may take together; those used longest ago go.

    Raises:
        ValueError: In one sentence, why the folder cannot be trusted.

    """

    def __init__(
        self, folder: Path, fingerprint: dict[str, object], most_bytes: int | None = None
    ) -> None:
        self._text = json.dumps(fingerprint, sort_keys=True, default=str)
        self._root = folder
        self._most_bytes = most_bytes
        self.use("")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(folder)
        # A folder that is mounted read-only may have files of other servers only.
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
        if self.folder.exists():
            check_owner(self.folder)
        self._writer = Threads(1, "kv-eviction-store-writer")
        self._lock, self._waiting = Lock(), 0
        self._results: dict[str, bool] = {}
        self._warn_at = 0.0
        self._remove_unfinished()

    def use(self, generation: str) -> None:
        """From now on, read and write stores of other weights than those the server began with.

        Args:
            generation: Checksum of the weights in memory; empty for those of the fingerprint.

        """
        self.fingerprint = sha256((self._text + generation).encode()).hexdigest()
        self.folder = self._root / self.fingerprint[:16]

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
        """Write a store on a thread, once ``ready`` returns; :meth:`results` tells the outcome."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with self._lock:
            # One alone is written however large it is.
            if self._waiting and self._waiting + num_bytes > MOST_WAITING_BYTES:
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
            written = True
            self.trim()
        except Exception as error:
            # Neither the error nor its traceback is kept: that one holds the tensors.
            self._warn(getattr(error, "strerror", None) or type(error).__name__)
        finally:
            with self._lock:
                self._waiting -= sum(tensor.nbytes for tensor in tensors.values())
                self._results[about["name"]] = written

    def _warn(self, reason: str) -> None:
        """Log that writing fails, once in a while for the whole folder."""
        if monotonic() >= self._warn_at:
            self._warn_at = monotonic() + WARN_EVERY_S
            logger.warning(
                "KV eviction: a store was not written to a file in %s: %s.", self._root, reason
            )

    def results(self) -> dict[str, bool]:
        """Return, by name, which stores given to :meth:`write_soon` since the last call are there.

        A store whose file existed already counts as written, one that was dropped does not.
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
        # Not its parents: a volume that is not mounted any more must not be written to.
        path.parent.mkdir(mode=0o700, exist_ok=True)
        metadata = about | {"sha256": digest(tensors, about)}
        header = json.dumps({"__metadata__": metadata, **_entries(tensors)}).encode()
        header += b" " * (-(8 + len(header)) % ALIGNMENT)
        descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".")
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
        most_bytes: int,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Region:
        """Read a store's file on the calling thread, and check it.

        Args:
            name: The store's.
            rank: Whose part of it.
            most_bytes: Its tensors take no more than that.
            wanted: Asked after each chunk; False ends the read.

        Returns:
            A copy of the file in shared memory.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: It is not a whole file of this store, rank and fingerprint.
            OSError: It cannot be read, or nobody waits for it any more.

        """
        expected = {"fingerprint": self.fingerprint, "name": name, "rank": str(rank)}
        descriptor = os.open(self.path(name, rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            size = status.st_size
            if not stat.S_ISREG(status.st_mode) or size > most_bytes + HEADER_BYTES:
                raise ValueError("it is no file, or too large")
            if size < 8:
                raise ValueError("it is no safetensors file")
            region = Region(size)
            buffer = memoryview(region.map())
            done = 0
            while done < size:
                if not wanted():
                    raise OSError("nobody waits for it any more")
                count = os.preadv(descriptor, [buffer[done : done + CHUNK_BYTES]], done)
                if not count:
                    raise ValueError("it became shorter while it was read")
                done += count
            verify(buffer, expected)
            # Not if the folder is mounted read-only, or the file is another user's.
            with suppress(OSError):
                os.utime(descriptor)
        finally:
            os.close(descriptor)
        return region

    def present(self, names: Iterable[str], ranks: int) -> set[str]:
        """Return the stores whose files exist for all ranks; asks on the calling thread."""
        every = range(ranks)
        return {n for n in names if all(os.path.exists(self.path(n, rank)) for rank in every)}

    def remove(self, name: str, ranks: int) -> None:
        """Remove a store's files on the calling thread, as far as they may be removed."""
        for rank in range(ranks):
            with suppress(OSError):
                self.path(name, rank).unlink(missing_ok=True)

    def trim(self) -> None:
        """Remove the files that were used longest ago until the rest are small enough.

        Works on the calling thread. A file that may not be removed is skipped.
        """
        if self._most_bytes is None:
            return
        found = []
        for path in self._root.glob(f"*/*{SUFFIX}"):
            if not OURS.fullmatch(path.relative_to(self._root).as_posix()):
                continue
            with suppress(OSError):
                found.append(((status := path.stat()).st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._most_bytes:
                return
            with suppress(OSError):
                path.unlink(missing_ok=True)
                total -= size

    def flush(self, patience: float = FLUSH_S) -> None:
        """Wait until all stores given so far are written, but no longer than ``patience`` s."""
        with suppress(TimeoutError):
            self._writer.submit(lambda: None).result(patience)


def check_owner(folder: Path) -> None:
    """Refuse a folder that other users control.

    Members of the folder's group are trusted: Kubernetes gives a volume's group to its pods.

    Raises:
        ValueError: The folder belongs to another user than this one or root, or every user may
            replace its files.

    """
    status = os.stat(folder)
    flag = "KV eviction: --kv-eviction-store-path"
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(
            f"{flag}: the folder {folder} belongs to the user {status.st_uid}, who could change "
            "answers; give one of the server's own user."
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise ValueError(
            f"{flag}: every user may write to the folder {folder} and so change answers; give a "
            "folder that does not exist yet, or remove that permission (chmod o-w)."
        )


def _in_order(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    """Tensors as a file has them: larger types first, so that each one is aligned."""
    return sorted(tensors.items(), key=lambda one: (-one[1].itemsize, one[0]))


def _entries(tensors: Tensors) -> dict[str, Any]:
    """The header of a safetensors file without its metadata."""
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
    """The bytes of all tensors, in the order of the file."""
    for _, tensor in _in_order(tensors):
        yield memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:CHUNK_BYTES]) :]


def _digest(about: dict[str, str], entries: dict[str, Any], data: Iterable[memoryview]) -> str:
    found = sha256(json.dumps([about, entries], sort_keys=True).encode())
    for part in data:
        found.update(part)
    return found.hexdigest()


def digest(tensors: Tensors, about: dict[str, str]) -> str:
    """Return SHA-256 over tensors, their names, types and shapes, and their file's metadata."""
    return _digest(about, _entries(tensors), _data(tensors))


def verify(buffer: memoryview, expected: dict[str, str]) -> None:
    """Check a file's content.

    Args:
        buffer: The content.
        expected: Its metadata, except the digest.

    Raises:
        ValueError: It is not a whole file with this metadata.

    """
    about, entries, begin = _parse(buffer)
    said = about.pop("sha256", None)
    if about != expected:
        raise ValueError("it holds something else")
    if _digest(about, entries, [buffer[begin:]]) != said:
        raise ValueError("it is damaged")


def _parse(buffer: memoryview) -> tuple[dict[str, str], dict[str, Any], int]:
    """Read the header of a safetensors file.

    Returns:
        Its metadata, its tensors' types, shapes and places, and the place of the first of them.

    Raises:
        ValueError: It is no such file, or has tensors that no store has.

    """
    length = int.from_bytes(buffer[:8], "little")
    if not 2 <= length <= min(len(buffer) - 8, HEADER_BYTES):
        raise ValueError("it is no safetensors file")
    try:
        entries = json.loads(bytes(buffer[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise ValueError("it is no safetensors file") from error
    about = entries.pop("__metadata__", None) if isinstance(entries, dict) else None
    if not isinstance(about, dict):
        raise ValueError("it is no safetensors file of a store")
    begin = 8 + length
    if not all(_is_store_tensor(one, begin, len(buffer) - begin) for one in entries.values()):
        raise ValueError("it holds no store")
    return about, entries, begin


def _is_store_tensor(entry: Any, begin: int, size: int) -> bool:
    """Whether a header's entry describes a tensor within ``size`` bytes that a store may have."""
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
        ValueError: It is no file of a store.

    """
    _, entries, begin = _parse(memoryview(buffer))
    return {
        name: torch.frombuffer(
            buffer,
            dtype=DTYPES[one["dtype"]],
            count=prod(one["shape"]),
            offset=begin + one["data_offsets"][0],
        ).view(one["shape"])
        for name, one in entries.items()
    }

"""The folder of stores: who may write to it, and how many bytes its files may take."""

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from time import monotonic, time

from vllm.logger import init_logger

from vllm_kvevict.stores.retention import file_order

logger = init_logger("vllm.kv_eviction.tiers")

SUFFIX = ".safetensors"
FOLDER_NAME = re.compile(r"[0-9a-f]{16}")
"""Names of the folders of one fingerprint each."""

UNFINISHED = ".store-"
"""Prefix of the names of files that are being written, or were when their server was killed."""

FILE_NAME = re.compile(r"[0-9a-f]{40}\.[0-9]+\.safetensors|\.store-[a-z0-9_]+")
"""Names of the files of stores, finished or not. Only these count and may be removed; other files
in the folder stay."""

UNFINISHED_FILE_AGE_S = 3600
"""Seconds after which an unfinished file is considered abandoned."""

DEFAULT_SHARE = 0.5
"""Share of the space that is free or holds stores which stores may take by default."""

TRIMMED_SHARE = 0.9
"""Share of the limit that remains when files were removed, so that not every write removes some."""

LIST_INTERVAL_S = 60.0
"""Seconds after which the folder is listed again when a store was written, because other servers
may have written as well."""


class FolderSpace:
    """Limits the bytes of the files of stores in a folder, which several servers may share.

    Methods access the folder on the calling thread.

    Args:
        root: The folder.
        max_bytes: Maximum bytes of all files in the folder, those of other servers and unfinished
            ones included. None for half of the space that is free or holds stores when the folder
            is first listed.

    """

    def __init__(self, root: Path, max_bytes: int | None) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._room = 0
        """Bytes that this server may write before the folder is listed again."""
        self._list_at = 0.0

    def announce(self) -> None:
        """Log the limit if it is the default one."""
        if self._max_bytes is None:
            with suppress(OSError):
                logger.warning(
                    "KV eviction: --kv-eviction-store-path: files of stores in %s may take up to "
                    "%.1f GiB, half of the space that is free or holds stores; add ,max=100G to "
                    "the folder for another limit.",
                    self._root,
                    self._limit(self._entries()) / 2**30,
                )

    @staticmethod
    def remove_unfinished(folder: Path) -> None:
        """Remove unfinished files of servers that were killed from a folder of one fingerprint."""
        for path in folder.glob(f"{UNFINISHED}*"):
            with suppress(OSError):
                if _is_abandoned(path.stat()):
                    path.unlink()

    def written(self, num_bytes: int) -> None:
        """Keep the folder small enough after this server wrote files of ``num_bytes``.

        The folder is listed only when this server may have filled a quarter of what was free, and
        once in :data:`LIST_INTERVAL_S`.
        """
        self._room -= num_bytes
        if self._room < 0 or monotonic() >= self._list_at:
            self.trim(TRIMMED_SHARE)

    def trim(self, share: float = 1.0) -> None:
        """Remove the least recently used files until the rest are small enough.

        A file that may not be removed is skipped. Unfinished files count; those of servers that
        were killed are removed first.

        Args:
            share: If the files exceed the limit, the rest take at most this share of it.

        """
        entries = self._entries()
        limit = self._max_bytes = self._limit(entries)
        total = sum(status.st_size for status, _ in entries)
        bound = limit if total <= limit else int(share * limit)
        for status, path in sorted(entries, key=_last_use):
            if total <= bound:
                break
            if _is_finished(path) or _is_abandoned(status):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                    total -= status.st_size
        # Other servers may write as well, so the folder is listed long before it is full.
        self._room = max(0, limit - total) // 4
        self._list_at = monotonic() + LIST_INTERVAL_S

    def _entries(self) -> list[tuple[os.stat_result, Path]]:
        """Return the files of stores in the folder, finished or not."""
        entries = []
        for folder in _listed(self._root, FOLDER_NAME):
            for entry in _listed(folder, FILE_NAME):
                with suppress(OSError):
                    entries.append((entry.stat(), Path(entry)))
        return entries

    def _limit(self, entries: list[tuple[os.stat_result, Path]]) -> int:
        """Return the maximum bytes of all files."""
        if self._max_bytes is not None:
            return self._max_bytes
        space = os.statvfs(self._root)
        free = space.f_bavail * space.f_frsize
        return int(DEFAULT_SHARE * (free + sum(status.st_size for status, _ in entries)))


def _listed(folder: "Path | os.DirEntry[str]", names: re.Pattern[str]) -> list[os.DirEntry[str]]:
    """Return the entries of a folder with these names; none if it is no folder or is gone."""
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry for entry in entries if names.fullmatch(entry.name)]
    return []


def _is_finished(path: Path) -> bool:
    return path.name.endswith(SUFFIX)


def _is_abandoned(status: os.stat_result) -> bool:
    return time() - status.st_mtime > UNFINISHED_FILE_AGE_S


def _last_use(entry: tuple[os.stat_result, Path]) -> tuple[bool, float]:
    status, path = entry
    return file_order(_is_finished(path), status.st_mtime)


def check_folder(folder: Path) -> None:
    """Reject a path that cannot be a folder of stores, without creating it.

    Raises:
        ValueError: It or one of its parents is a file, or other users control it.

    """
    try:
        if folder.is_dir():
            check_owner(folder)
        for existing in (folder, *folder.parents):
            if existing.exists() and not existing.is_dir():
                raise ValueError(no_folder(folder, f"{existing} is not a folder"))
    except OSError as error:
        raise ValueError(no_folder(folder, error.strerror)) from error


def no_folder(folder: Path, reason: str | None) -> str:
    return (
        f"KV eviction: --kv-eviction-store-path: the folder {folder} cannot be used ({reason}); "
        "give a folder that exists, or that the server may create."
    )


def check_owner(folder: Path) -> None:
    """Reject a folder that other users control.

    Members of the folder's group are trusted: Kubernetes gives a volume's group to its pods.

    Raises:
        ValueError: The folder belongs to another user than this one or root, or every user may
            replace its files.

    """
    status = os.stat(folder)
    flag = "KV eviction: --kv-eviction-store-path"
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(
            f"{flag}: the folder {folder} belongs to user {status.st_uid}, who could change "
            "answers; give a folder that belongs to the server's user."
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise ValueError(
            f"{flag}: every user may write to the folder {folder} and so change answers; give a "
            "folder that does not exist yet, or remove that permission (chmod o-w)."
        )


def check_trusted(folder: Path) -> None:
    """Reject a folder that other users control; a folder for new weights is made while serving.

    Raises:
        PermissionError: Other users control it.
        OSError: It cannot be examined.

    """
    try:
        check_owner(folder)
    except ValueError as error:
        raise PermissionError(errno.EPERM, f"other users control {folder}") from error

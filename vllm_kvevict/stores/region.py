"""Anonymous memory that the processes of one host share without copying it."""

import mmap
import os
from uuid import uuid4

Handle = tuple[str, str, int]
"""Path of a region's descriptor under ``/proc``, name of the region, and size in bytes."""


class Region:
    """Memory of a fixed size that other processes of the same user and host can map.

    The memory is released when the object and all mappings of it are gone.

    Args:
        size: Size in bytes, at least 1.

    Raises:
        OSError: The process has no descriptor or no memory left.

    """

    def __init__(self, size: int) -> None:
        self._descriptor = -1
        self._name = f"kv-eviction-{uuid4().hex}"
        self._size = size
        self._descriptor = os.memfd_create(self._name, os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, size)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    @property
    def handle(self) -> Handle:
        """Values with which another process can map the region as long as this object exists."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}", self._name, self._size

    def map(self) -> mmap.mmap:
        """Return a writable mapping of the region."""
        return mmap.mmap(self._descriptor, self._size)


def open_region(handle: Handle) -> mmap.mmap | None:
    """Map a region of another process.

    Args:
        handle: Handle of the region.

    Returns:
        A mapping that may be written to without changing the region; None if this process cannot
        map the region, because it is gone or on another host, or because the process has no
        descriptor or memory left.

    """
    path, name, size = handle
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # On another host, the same process and descriptor numbers refer to something else.
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{name} (deleted)":
            return None
        return mmap.mmap(
            descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    except OSError:
        return None
    finally:
        os.close(descriptor)

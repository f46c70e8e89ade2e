"""Pinned host memory that returns to the operating system when it is no longer used."""

from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock
from weakref import finalize

import torch

from vllm_kvevict.stores.threads import Threads

MIN_IDLE_BYTES = 2**30
"""Bytes of idle pinned memory that PyTorch may always keep, as many as may wait to be written."""

USED_BYTES_PER_IDLE_BYTE = 4


def _allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


class PinnedMemory:
    """Allocates pinned tensors and bounds the idle memory that PyTorch keeps for them.

    PyTorch rounds pinned memory up to powers of two, keeps what is freed, and reuses it for the
    same size only. As documents change their size, it would keep a whole
    ``--kv-eviction-store-memory`` for each size. This class counts the blocks of each size. If the
    idle ones have more than :data:`MIN_IDLE_BYTES` and more than a quarter of the bytes in use,
    PyTorch frees them, on a thread, because that takes longer than a step.

    Args:
        allocate: Returns an uninitialized tensor.
        release: Frees all idle memory.

    """

    def __init__(
        self,
        allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor] = _allocate,
        release: Callable[[], None] = torch.accelerator.empty_host_cache,
    ) -> None:
        self._allocate = allocate
        self._release = release
        self._lock = Lock()
        self._used: Counter[int] = Counter()
        """Number of tensors in use by size of their block in bytes."""
        self._held: Counter[int] = Counter()
        """Number of blocks that PyTorch has, by size."""
        self._thread = Threads(1, "kv-eviction-pinned-memory")

    @property
    def idle_bytes(self) -> int:
        """Bytes that PyTorch keeps and no tensor uses."""
        with self._lock:
            return _bytes(self._held) - _bytes(self._used)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized pinned tensor; its memory is idle once the tensor is gone."""
        num_bytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
        size = 1 << (num_bytes - 1).bit_length()
        tensor = self._allocate(shape, dtype)
        with self._lock:
            self._used[size] += 1
            self._held[size] = max(self._held[size], self._used[size])
        finalize(tensor, self._freed, size).atexit = False
        return tensor

    def trim(self) -> None:
        """Free idle memory if there is too much of it."""
        with self._lock:
            used = _bytes(self._used)
            idle = _bytes(self._held) - used
            if idle <= max(MIN_IDLE_BYTES, used // USED_BYTES_PER_IDLE_BYTE):
                return
            self._held = self._used.copy()
        self._thread.submit(self._release)

    def clear(self) -> None:
        """Free all idle memory now."""
        with self._lock:
            self._held = self._used.copy()
        self._release()

    def _freed(self, size: int) -> None:
        with self._lock:
            self._used[size] -= 1


def _bytes(blocks: Counter[int]) -> int:
    return sum(size * count for size, count in blocks.items())

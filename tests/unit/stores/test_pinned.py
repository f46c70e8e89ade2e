"""Pinned memory as documents change their size, with PyTorch's allocator imitated."""

from collections import Counter, deque
from collections.abc import Sequence

import pytest
import torch

from vllm_kvevict.stores import pinned
from vllm_kvevict.stores.pinned import PinnedMemory

LIMIT = 8000
"""Bytes of stores in use at once."""


class Allocator:
    """Keeps freed blocks of each power of two for tensors of that size, like PyTorch's."""

    def __init__(self) -> None:
        self.used: Counter[int] = Counter()
        self.held: Counter[int] = Counter()
        self.releases = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        size = 1 << (tensor.nbytes - 1).bit_length()
        self.used[size] += 1
        self.held[size] = max(self.held[size], self.used[size])
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        self.used[1 << (tensor.nbytes - 1).bit_length()] -= 1

    def release(self) -> None:
        self.releases += 1
        self.held = self.used.copy()

    @property
    def num_bytes(self) -> int:
        return sum(size * count for size, count in self.held.items())


@pytest.fixture
def allocator(monkeypatch) -> Allocator:
    monkeypatch.setattr(pinned, "MIN_IDLE_BYTES", 1000)
    return Allocator()


@pytest.fixture
def memory(allocator) -> PinnedMemory:
    memory = PinnedMemory(allocator.allocate, allocator.release)
    # On the calling thread.
    memory._thread.submit = lambda work: work()
    return memory


def serve(allocator: Allocator, memory: PinnedMemory, sizes: Sequence[int]) -> int:
    """Keep tensors of these sizes, the latest within the limit; returns the most bytes held."""
    kept: deque[torch.Tensor] = deque()
    most = 0
    for size in sizes:
        while kept and sum(tensor.nbytes for tensor in kept) + size > LIMIT:
            allocator.free(kept.popleft())
        kept.append(memory.empty((size // 4,), torch.float32))
        memory.trim()
        held = sum(n * count for n, count in memory._held.items())
        assert held == allocator.num_bytes
        most = max(most, allocator.num_bytes)
    return most


def test_memory_is_bounded_as_documents_change_their_size(allocator, memory):
    sizes = [size for size in (128, 256, 512, 1024, 2048, 4096) for _ in range(200)]
    most = serve(allocator, memory, sizes)
    assert most <= LIMIT + LIMIT // 4 + 1000 + 4096
    assert allocator.releases > 3


def test_memory_of_one_size_is_reused(allocator, memory):
    serve(allocator, memory, [512] * 500)
    assert allocator.releases == 0


def test_sizes_are_rounded_up_to_powers_of_two(memory):
    tensor = memory.empty((3, 100), torch.uint8)
    assert tensor.shape == (3, 100) and tensor.dtype == torch.uint8
    assert memory._used == {512: 1} and memory.idle_bytes == 0
    del tensor
    assert memory.idle_bytes == 512

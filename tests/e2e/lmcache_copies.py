"""LMCache on a CPU: all of it but the kernels that copy chunks, which it has for GPUs only."""

from typing import Any

import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.pin_monitor import PinMonitor


class Copies(GPUConnectorInterface):
    """Copies chunks of whole blocks between a KV cache on the CPU and LMCache's memory.

    Args:
        shape: LMCache's [layers, 2, tokens of a chunk, KV heads, head size].
        block_size: Tokens of a block; a chunk has a multiple.

    """

    def __init__(self, shape: tuple[int, ...], block_size: int) -> None:
        self.layers, _, self.chunk, heads, size = shape
        self.hidden, self.block_size = heads * size, block_size
        self.saved = self.loaded = 0
        self.spoil: set[int] = set()
        """Numbers of the coming loads that write something else."""
        self.spoiled: set[int] = set()
        """Blocks that they wrote."""

    def pinned(self) -> int:
        """Return the number of chunks that LMCache must not forget."""
        return PinMonitor.GetOrCreate().get_monitored_count()

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self.layers, num_tokens, self.hidden])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        for chunk, blocks in self._both(memory_obj, start, end, kwargs):
            chunk.copy_(blocks)
        self.saved += 1

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        for chunk, blocks in self._both(memory_obj, start, end, kwargs):
            blocks.copy_(chunk if self.loaded not in self.spoil else torch.randn_like(chunk))
        if self.loaded in self.spoil:
            slots = kwargs["slot_mapping"][start:end]
            self.spoiled.update((slots // self.block_size).tolist())
        self.loaded += 1

    def _both(self, memory_obj: Any, start: int, end: int, kwargs: Any) -> Any:
        """Yield each block of a chunk in each layer, in LMCache's memory and in the KV cache."""
        caches, slots = kwargs["kvcaches"], kwargs["slot_mapping"][start:end]
        blocks = (slots[:: self.block_size] // self.block_size).tolist()
        expected = [b * self.block_size + i for b in blocks for i in range(self.block_size)]
        assert slots.tolist() == expected, "chunks are whole blocks"
        memory = memory_obj.tensor.view(len(caches), len(blocks), -1)
        for layer, cache in enumerate(caches):
            for index, block in enumerate(blocks):
                yield memory[layer, index], cache[block].reshape(-1)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for one in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*one, **kwargs)

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for one in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*one, **kwargs)

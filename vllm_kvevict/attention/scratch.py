"""What per-head attention on a GPU works in: buffers at fixed addresses, for CUDA graphs."""

from dataclasses import dataclass
from typing import Literal

import torch
from vllm.platforms import current_platform

from vllm_kvevict.attention.xformers_ops import takes_pages
from vllm_kvevict.ops.triton.residency import resident
from vllm_kvevict.schedule.timeline import blocks_for

Kernel = Literal["flash", "triton", "xformers"]

SPLITS_PER_PROGRAM = 2
SMALLEST_SPLIT = 64
GATHERED_BYTES = 2**27
"""Keys and values that xformers' CUTLASS op reads at once; one sequence may always."""
LAUNCH = 2**15
"""Most sequences of a call of either of xformers' ops: a launch has at most 65535 of them."""
SPLITS = 1024
"""Most splits of all sequences of a call of xformers' paged op, where it splits any."""


@dataclass(frozen=True)
class Shape:
    """The evictable layers of one rank, and the batches that it runs."""

    num_heads: int
    group: int
    head_size: int
    block_size: int
    max_requests: int
    max_model_len: int
    itemsize: int = 2
    fp8: bool = False


class Scratch:
    """Shared by all layers, which run one after the other.

    Args:
        kernel: ``flash`` needs one layer's page table, ``triton`` one for requests with several
            queries and partial sums of its splits, ``xformers`` one and room for gathered pages.
        shape: The layers.
        device: Where attention runs.

    """

    def __init__(self, kernel: Kernel, shape: Shape, device: torch.device) -> None:
        self.kernel = kernel
        self.shape = shape
        self.programs, self.stages = 8, 1
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self.programs, self.stages = resident(
                shape.head_size, shape.itemsize, shape.fp8, found.shared_memory_per_multiprocessor
            )
            self.programs *= found.multi_processor_count
        self.target = self.programs * SPLITS_PER_PROGRAM
        sequences = shape.max_requests * shape.num_heads
        self.max_splits = self.target + sequences
        self.table = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self.partial = torch.zeros(0, shape.group, shape.head_size, device=device)
        self.weights = torch.zeros(0, shape.group, 2, device=device)
        self.dense = torch.zeros(0, dtype=torch.uint8, device=device)
        self.paged = False
        pages = blocks_for(shape.max_model_len, shape.block_size)
        if kernel != "xformers":
            self.table = torch.zeros(sequences, pages, dtype=torch.int32, device=device)
        else:
            rows = power_of_two(sequences)
            self.table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
            size = max(GATHERED_BYTES, pages * self._page_bytes)
            self.dense = torch.zeros(size, dtype=torch.uint8, device=device)
            capability = current_platform.get_device_capability()
            self.paged = capability is not None and takes_pages(
                tuple(capability), shape.itemsize, shape.head_size
            )
        if kernel == "triton":
            splits = (self.max_splits, shape.group)
            self.partial = torch.zeros(*splits, shape.head_size, device=device)
            self.weights = torch.zeros(*splits, 2, device=device)

    @property
    def num_bytes(self) -> int:
        buffers = (self.table, self.partial, self.weights, self.dense)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    @property
    def op_bytes(self) -> int:
        """What xformers' paged op allocates itself: partial sums in float32 for 32 rows or more."""
        rows = -(-self.shape.group // 32) * 32
        split = rows * self.shape.head_size * 4 + self.shape.group * 8
        return SPLITS * split if self.paged else 0

    def pages(self, sequences: int, longest: int) -> torch.Tensor:
        """[sequences, V] int32 of the page table, for at most ``longest`` tokens each.

        V is a power of two where the table is as wide: kernels are compiled for few widths.
        """
        columns = power_of_two(blocks_for(longest, self.shape.block_size))
        return self.table[:sequences, :columns]

    def gathered(self, columns: int) -> int:
        """Sequences of ``columns`` pages each that the buffer of gathered pages holds."""
        return min(LAUNCH, self.dense.numel() // (columns * self._page_bytes))

    @property
    def _page_bytes(self) -> int:
        return self.shape.block_size * 2 * self.shape.head_size * self.shape.itemsize


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()

"""What per-head attention on a GPU works in: buffers at fixed addresses, for CUDA graphs."""

from dataclasses import dataclass
from typing import Literal

import torch
from vllm.platforms import current_platform

from vllm_kvevict.attention.xformers_ops import takes_pages
from vllm_kvevict.ops.triton.merge import Partials
from vllm_kvevict.ops.triton.residency import resident
from vllm_kvevict.schedule.timeline import blocks_for

Kernel = Literal["flash", "triton", "xformers"]

SPLITS_PER_PROGRAM = 3
SMALLEST_SPLIT = 64
MOST_SEQUENCES = 992
"""Of a call of FlashAttention 3 in which it splits the keys of a sequence."""
MOST_SPLITS = 32
"""Of one sequence in FlashAttention, as vLLM bounds them in graphs."""
PARTIAL_BYTES = 2**27
"""Partial sums that FlashAttention 3 may allocate for its splits, of one layer at a time."""
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
        kernel: ``flash`` and ``triton`` need one layer's page table and partial sums of the splits
            of our own kernel, ``xformers`` a table and room for gathered pages.
        shape: The layers.
        device: Where attention runs; ``meta`` to count the bytes.

    """

    def __init__(self, kernel: Kernel, shape: Shape, device: torch.device) -> None:
        self.kernel = kernel
        self.shape = shape
        self.programs, self.stages = 8, 1
        if device.type != "cpu" and torch.cuda.is_available():
            found = torch.cuda.get_device_properties(torch.cuda.current_device())
            self.programs, self.stages = resident(
                shape.head_size, shape.itemsize, shape.fp8, found.shared_memory_per_multiprocessor
            )
            self.programs *= found.multi_processor_count
        self.target = self.programs * SPLITS_PER_PROGRAM
        sequences = shape.max_requests * shape.num_heads
        self.max_splits = 0 if kernel == "xformers" else self.target + sequences
        room = sequences if self.max_splits else 0
        self.partials = Partials.room(self.max_splits, room, shape.group, shape.head_size, device)
        self.table = torch.zeros(0, 0, dtype=torch.int32, device=device)
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

    @property
    def num_bytes(self) -> int:
        buffers = (self.table, self.dense)
        own = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
        return own + (self.partials.num_bytes if self.max_splits else 0)

    def by_splits(self, requests: int) -> bool:
        """Whether decode steps of so many requests run our kernel, not FlashAttention.

        The same for every step of a graph.
        """
        sequences = requests * self.shape.num_heads
        return self.kernel == "triton" or (self.kernel == "flash" and sequences > MOST_SEQUENCES)

    def flash_splits(self, tokens: int, most: int = MOST_SPLITS) -> int:
        """Splits of a sequence for FlashAttention 3, which allocates partial sums for all of them.

        Left to itself it allocates for as many as fill the GPU, were there one sequence, and a head
        is a sequence here: gigabytes for some thousand query tokens.

        Args:
            tokens: Query tokens of the step.
            most: To be made at most.

        """
        shape = self.shape
        split = tokens * shape.num_heads * shape.group * (shape.head_size + 1) * 4
        return max(1, min(most, PARTIAL_BYTES // max(1, split)))

    @property
    def op_bytes(self) -> int:
        """What attention's kernels allocate themselves.

        Partial sums: of FlashAttention's splits, or in xformers' paged op, in float32 for 32 rows
        or more.
        """
        if self.kernel == "flash":
            return PARTIAL_BYTES
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

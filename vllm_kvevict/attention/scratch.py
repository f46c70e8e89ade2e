"""What per-head attention on a GPU works in: buffers at fixed addresses, for CUDA graphs."""

from typing import Literal

import torch

from vllm_kvevict.attention.kernels import Shape as Shape
from vllm_kvevict.attention.kernels import optional_kernel, power_of_two
from vllm_kvevict.ops.triton.merge import Partials
from vllm_kvevict.ops.triton.residency import resident
from vllm_kvevict.timeline.rule import blocks_for

Kernel = Literal["flash", "triton", "xformers"]

SPLITS_PER_PROGRAM = 3
SMALLEST_SPLIT = 64
MOST_SEQUENCES = 992
"""Of a call of FlashAttention 3 in which it splits the keys of a sequence."""
MOST_SPLITS = 32
"""Of one sequence in FlashAttention, as vLLM bounds them in graphs."""
PARTIAL_BYTES = 2**27
"""Partial sums that FlashAttention 3 may allocate for its splits, of one layer at a time."""


class Scratch:
    """Shared by all layers, which run one after the other.

    Args:
        kernel: ``flash`` and ``triton`` need one layer's page table and partial sums of the splits
            of our own kernel; an optional kernel needs a table, and has buffers of its own.
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
        optional = optional_kernel(kernel)
        self.optional = optional(shape, device) if optional is not None else None
        self.max_splits = 0 if self.optional else self.target + sequences
        room = sequences if self.max_splits else 0
        self.partials = Partials.room(self.max_splits, room, shape.group, shape.head_size, device)
        rows = power_of_two(sequences) if self.optional else sequences
        pages = blocks_for(shape.max_model_len, shape.block_size)
        self.table = torch.zeros(rows, pages, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        table = self.table.numel() * self.table.element_size()
        return table + (self.optional.num_bytes if self.optional else self.partials.num_bytes)

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
        """Bytes that attention's kernels allocate themselves at most: partial sums of splits."""
        if self.optional is not None:
            return self.optional.op_bytes
        return PARTIAL_BYTES if self.kernel == "flash" else 0

    def pages(self, sequences: int, longest: int) -> torch.Tensor:
        """[sequences, V] int32 of the page table, for at most ``longest`` tokens each.

        V is a power of two where the table is as wide: kernels are compiled for few widths.
        """
        columns = power_of_two(blocks_for(longest, self.shape.block_size))
        return self.table[:sequences, :columns]

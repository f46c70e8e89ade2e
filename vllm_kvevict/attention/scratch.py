"""What per-head attention on a GPU works in: buffers at fixed addresses, for CUDA graphs."""

from dataclasses import dataclass
from typing import Literal

import torch

from vllm_kvevict.timeline import blocks_for

Kernel = Literal["flash", "triton"]

PROGRAMS_PER_SM = 4
SPLITS_PER_PROGRAM = 2
SMALLEST_SPLIT = 64


@dataclass(frozen=True)
class Shape:
    """The evictable layers of one rank, and the batches that it runs."""

    num_heads: int
    group: int
    head_size: int
    block_size: int
    max_requests: int
    max_model_len: int


class Scratch:
    """Shared by all layers, which run one after the other.

    Args:
        kernel: ``flash`` needs one layer's page table, ``triton`` partial sums of its splits.
        shape: The layers.
        device: Where attention runs.

    """

    def __init__(self, kernel: Kernel, shape: Shape, device: torch.device) -> None:
        self.kernel = kernel
        self.shape = shape
        self.programs = 8
        if device.type == "cuda":
            units = torch.cuda.get_device_properties(device).multi_processor_count
            self.programs = units * PROGRAMS_PER_SM
        self.target = self.programs * SPLITS_PER_PROGRAM
        sequences = shape.max_requests * shape.num_heads
        self.max_splits = self.target + sequences
        self.table = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self.partial = torch.zeros(0, shape.group, shape.head_size, device=device)
        self.weights = torch.zeros(0, shape.group, 2, device=device)
        if kernel == "flash":
            pages = blocks_for(shape.max_model_len, shape.block_size)
            self.table = torch.zeros(sequences, pages, dtype=torch.int32, device=device)
        else:
            splits = (self.max_splits, shape.group)
            self.partial = torch.zeros(*splits, shape.head_size, device=device)
            self.weights = torch.zeros(*splits, 2, device=device)

    @property
    def num_bytes(self) -> int:
        buffers = (self.table, self.partial, self.weights)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

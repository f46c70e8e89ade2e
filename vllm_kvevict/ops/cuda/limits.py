"""What the kernels are compiled for: the numbers of ``csrc/sizes.h`` that Python plans with."""

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)

MOST_LAYERS = 128
"""Layers of a launch."""

CHUNK = 1024
"""Columns of a block; the maxima and sums of each are merged in order."""


def rows_at_once(head_size: int) -> int:
    """Query rows of a KV head that see a key at once; more take more reads of the keys."""
    return 256 if head_size <= 128 else 128

"""Sizes for which the kernels are compiled, as in ``csrc/sizes.h``."""

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)

MAX_LAYERS = 128
"""Maximum number of layers in a launch."""

CHUNK = 1024
"""Columns of a thread block. The maxima and sums of the blocks are merged in order."""


def rows_at_once(head_size: int) -> int:
    """Return the number of query rows of a KV head for which one read of the keys suffices."""
    return 256 if head_size <= 128 else 128

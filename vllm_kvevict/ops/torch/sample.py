"""Draws without replacement that are the same on every rank and in every run. Reference."""

import hashlib
from collections.abc import Iterable

import torch

HALF_STEP = 2.0**-54
"""Half the spacing of torch's float64 uniform draws, added to keep them away from 0 and 1."""


def digest(numbers: Iterable[int]) -> int:
    """Return a seed in [0, 2**64) from 64-bit signed integers. It is the same on every machine."""
    content = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def gumbel(seed: int, count: int) -> torch.Tensor:
    """Return standard Gumbel noise.

    The ``k`` highest of ``logits + gumbel`` are ``k`` draws without replacement from
    ``softmax(logits)``, in the order of the draws (Gumbel top-k).

    Args:
        seed: In [0, 2**64).
        count: Number of draws.

    Returns:
        [count] float64 on the CPU, finite.

    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, dtype=torch.float64, generator=generator, device="cpu")
    uniform += HALF_STEP
    return -(-uniform.log()).log()

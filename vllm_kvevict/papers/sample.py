"""sample: draw tokens without replacement, the same on every rank and in every run. Reference."""

import hashlib
from collections.abc import Iterable

import torch

HALF_STEP = 2.0**-54
"""Half the distance between two of torch's float64 uniforms: keeps them off 0 and 1."""


def digest(numbers: Iterable[int]) -> int:
    """A seed in [0, 2**64) of 64-bit signed integers, in order. The same on every machine."""
    content = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def gumbel(seed: int, count: int) -> torch.Tensor:
    """Standard Gumbel noise.

    The ``k`` highest of ``logits + gumbel`` are ``k`` draws without replacement from
    ``softmax(logits)``, in the order of the draws (Gumbel top-k).

    Args:
        seed: In [0, 2**64).
        count: How many.

    Returns:
        [count] float64 on the CPU, finite.

    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, dtype=torch.float64, generator=generator, device="cpu")
    uniform += HALF_STEP
    return -(-uniform.log()).log()

"""Sequences of a step in parts whose gathered keys fit a buffer, cut without asking the GPU."""

from dataclasses import dataclass

import torch

LAUNCH = 2**15
"""Most sequences of a call of either op: a launch has at most 65535 of them."""
SPLITS = 1024
"""Most splits of all sequences of a call of the paged op, if it splits any."""


@dataclass(frozen=True)
class Part:
    """Sequences ``first`` to ``last`` - 1, whose queries are ``begin`` to ``end`` - 1.

    ``starts`` are the first query of each sequence, counted from ``begin``, and the end, on the
    host; ``on_device`` the same as [last - first + 1] int32.
    """

    first: int
    last: int
    begin: int
    end: int
    starts: list[int]
    on_device: torch.Tensor

    @property
    def longest(self) -> int:
        """Most queries of a sequence."""
        return max(b - a for a, b in zip(self.starts, self.starts[1:], strict=False))


def cut(starts: list[int], on_device: torch.Tensor, most: int) -> list[Part]:
    """Cut N sequences into parts of as many sequences as possible.

    Args:
        starts: [N + 1] first query of each sequence, and the end.
        on_device: The same, [N + 1] int32.
        most: Sequences that a part may have, at least 1.

    """
    parts = []
    for first in range(0, len(starts) - 1, most):
        last = min(first + most, len(starts) - 1)
        begin, end = starts[first], starts[last]
        own = [start - begin for start in starts[first : last + 1]]
        device = on_device[first : last + 1]
        parts.append(Part(first, last, begin, end, own, device - begin if begin else device))
    return parts

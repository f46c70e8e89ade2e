"""Division of a step's sequences into parts that fit the buffer of gathered keys.

It is computed on the host, without waiting for the GPU.
"""

from dataclasses import dataclass

import torch

LAUNCH = 2**15
"""Maximum number of sequences in a call of either op. A launch has at most 65535 of them."""
SPLITS = 1024
"""Maximum number of splits of all sequences in a call of the paged op, if it splits any."""


@dataclass(frozen=True)
class Part:
    """Sequences ``first`` to ``last`` - 1, with queries ``begin`` to ``end`` - 1.

    ``starts`` are the indices of the first query of each sequence, counted from ``begin``, and the
    end, on the host. ``on_device`` are the same numbers as [last - first + 1] int32 on the device.
    """

    first: int
    last: int
    begin: int
    end: int
    starts: list[int]
    on_device: torch.Tensor

    @property
    def longest(self) -> int:
        """Maximum number of queries of a sequence."""
        return max(b - a for a, b in zip(self.starts, self.starts[1:], strict=False))


def cut(starts: list[int], on_device: torch.Tensor, max_sequences: int) -> list[Part]:
    """Cut N sequences into parts of as many sequences as possible.

    Args:
        starts: [N + 1] index of the first query of each sequence, and the end.
        on_device: ``starts`` on the device, [N + 1] int32.
        max_sequences: Maximum number of sequences of a part, at least 1.

    """
    parts = []
    for first in range(0, len(starts) - 1, max_sequences):
        last = min(first + max_sequences, len(starts) - 1)
        begin, end = starts[first], starts[last]
        relative = [start - begin for start in starts[first : last + 1]]
        device = on_device[first : last + 1]
        parts.append(Part(first, last, begin, end, relative, device - begin if begin else device))
    return parts

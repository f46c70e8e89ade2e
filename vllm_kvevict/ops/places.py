"""Where the elements of a head page's tokens lie, as compiled operations read it."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Places:
    """Where the elements of a page's tokens lie.

    Args:
        offsets: [block_size, E] int64.
        first: Where token 0 begins; -1 where tokens and elements are not at even steps.
        by_token: Step from a token to the next.
        by_element: Step from an element to the next.

    """

    offsets: np.ndarray
    first: int
    by_token: int
    by_element: int

    @classmethod
    def of(cls, offsets: torch.Tensor) -> "Places":
        """Of offsets [block_size, E] int64."""
        found = offsets.cpu().contiguous().numpy()
        tokens, size = found.shape
        first = int(found[0, 0])
        by_token = int(found[1, 0]) - first if tokens > 1 else 1
        by_element = int(found[0, 1]) - first if size > 1 else 1
        even = first + by_token * np.arange(tokens)[:, None] + by_element * np.arange(size)
        if not np.array_equal(found, even):
            first = by_token = by_element = -1
        return cls(found, first, by_token, by_element)

    @property
    def steps(self) -> tuple[int, int, int]:
        return self.first, self.by_token, self.by_element

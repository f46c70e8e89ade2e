"""Budgets that fall with depth, and how layers are grouped to hold them. Pure arithmetic.

PyramidKV (arXiv:2406.02069), section 4.2, which Ada-KV section 3.4 takes over as "Pyramid":
the deepest layer keeps ``k / (beta * L)`` of a total of k tokens beside the window, the
shallowest ``2 k / L`` less that, and the others lie on the line between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Pyramid:
    """The layers of one group in a pyramid, numbered by depth from 0.

    Args:
        first: Shallowest layer of the group.
        stop: Behind its deepest layer.
        layers: L, all layers that evict.
        beta: Steepness; the deepest of all keeps ``1 / beta`` of the uniform budget.

    Raises:
        ValueError: The group lies outside the layers, or beta is below 1.

    """

    first: int
    stop: int
    layers: int
    beta: float

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop <= self.layers or self.beta < 1:
            raise ValueError("a group must lie inside the layers, and beta must be at least 1")

    def tokens(self, budget: float, length: float) -> float:
        """Tokens per KV head that the group keeps beside the window: the mean of its layers.

        No layer is given more than there is: where the shallowest would be, the line falls less
        steeply, so that the layers still keep ``budget`` on average. Where all layers could keep
        everything there is no pyramid.

        Args:
            budget: Mean over all layers, window not included.
            length: Tokens before the window.

        """
        deepest = budget / self.beta
        if 2 * budget - deepest > length:
            deepest = 2 * budget - length
        if budget >= length or self.layers == 1:
            return budget
        middle = (self.first + self.stop - 1) / 2
        return budget + (budget - deepest) * (1 - 2 * middle / (self.layers - 1))


MOST_PADDING = 0.1
"""Share of the KV cache that uneven groups may leave unused before there are fewer groups."""


def cut(layers: int, most: int) -> list[range]:
    """Cut ``layers`` layers into at most ``most`` groups of neighbours, as even as can be.

    Fewer groups where they waste less than the most would, beyond :data:`MOST_PADDING`.
    """

    def waste(count: int) -> int:
        missing = padding([len(group) for group in _even(layers, count)])
        return missing if missing > MOST_PADDING * layers else 0

    return _even(layers, min(range(min(most, layers), min(layers, 2) - 1, -1), key=waste))


def _even(layers: int, count: int) -> list[range]:
    starts = [-(-layers * index // count) for index in range(count + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def padding(sizes: Sequence[int]) -> int:
    """Layers that vLLM adds to groups of these sizes, and whose memory nobody uses.

    A block id stands for one block in every layer of a group, so vLLM makes all groups as large
    as the smallest, cutting larger ones up, or as the largest where that is less than 1.5 times
    as large (``_get_kv_cache_groups_uniform_page_size``).
    """
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    return sum(-count % size for count in sizes)

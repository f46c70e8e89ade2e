"""Memory of a pretended device: which allocations go to the driver, and how much a pool holds."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class Memory:
    """Follows the memory of results from its allocation to its end.

    ``outside`` names allocations that no pool served, ``live`` and ``peak`` count the bytes that
    pools hold now and at most.
    """

    def __init__(self) -> None:
        self.outside: list[str] = []
        self.live = self.peak = 0
        self._pooled = False
        self._sizes: dict[int, int] = {}

    def follow(self, name: str, result: Any, arguments: Any = ()) -> None:
        """Note the memory of an operation's result that none of its arguments has."""
        given = {_number(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or not leaf.numel():
                continue
            number = _number(leaf)
            if number in given or number in self._sizes:
                continue
            storage = leaf.untyped_storage()
            self._sizes[number] = storage.nbytes() if self._pooled else 0
            if self._pooled:
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
            else:
                self.outside.append(name)
            weakref.finalize(storage, self._free, number)

    def _free(self, number: int) -> None:
        self.live -= self._sizes.pop(number, 0)

    @contextmanager
    def use(self, pool: Any, device: Any = None) -> Iterator[None]:
        """Take the place of ``torch.cuda.use_mem_pool``."""
        before, self._pooled = self._pooled, True
        try:
            yield
        finally:
            self._pooled = before


def _number(tensor: torch.Tensor) -> int:
    return tensor.as_subclass(torch.Tensor).untyped_storage()._cdata

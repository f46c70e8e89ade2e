"""How a CPU kernel packs keys and values inside a head page, and copying tokens through it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_kvevict.ops.fp8 import typed

BASE = 16
"""float8_e4m3fn holds integers up to 16 exactly: elements are numbered digit by digit."""

Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class PageLayout:
    """Element offsets of every (token, dimension) in a page of ``2 * block_size * D`` elements.

    vLLM's CPU kernels store keys transposed or in tiles, depending on the instruction set, so
    the layout is measured once: a page is written with numbered elements and read back.

    Args:
        keys: [block_size, D] int64 offsets of the keys.
        values: [block_size, D] int64 offsets of the values.

    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def measure(
        cls,
        write: Writer,
        block_size: int,
        head_size: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
    ) -> "PageLayout":
        """Measure the layout.

        Args:
            write: Writes keys [block_size, 1, D] and values [block_size, 1, D] to a zeroed
                cache [1, 1, block_size, 2 * D] through the kernel that serves the layer.
            block_size: Tokens in a page.
            head_size: D.
            dtype: Element type of keys and values.
            cache_dtype: Element type of the cache: ``dtype``, or uint8 for FP8.

        Raises:
            ValueError: The kernel does not store every element exactly once, unchanged.

        """
        count = block_size * head_size
        numbers = torch.arange(2 * count)
        found = torch.zeros(2 * count, dtype=torch.int64)
        for digit in range(math.ceil(math.log(2 * count, BASE)) or 1):
            values = (numbers // BASE**digit % BASE).to(dtype).view(2, block_size, 1, head_size)
            cache = torch.zeros(1, 1, block_size, 2 * head_size, dtype=cache_dtype)
            write(values[0], values[1], cache)
            found += typed(cache).flatten().long() * BASE**digit
        order = found.argsort(stable=True)
        if not torch.equal(found[order], numbers):
            raise ValueError(
                "KV eviction cannot move tokens in this KV cache: the attention kernel packs "
                f"{dtype} pages of {block_size} x {head_size} in a way that is not a permutation."
            )
        offsets = order.view(2, block_size, head_size)
        return cls(offsets[0].contiguous(), offsets[1].contiguous())

    @property
    def block_size(self) -> int:
        return self.keys.shape[0]

    @cached_property
    def _views(self) -> tuple["_View", "_View"]:
        return _View(self.keys), _View(self.values)

    def read_keys(self, pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Keys of whole pages.

        Args:
            pages: [num_pages, 2 * block_size * D]: a layer's cache as head pages.
            index: [...] int64 pages.

        Returns:
            [..., block_size, D] in the cache's dtype, a copy.

        """
        strided = self._views[0].of(pages)
        return pages[index][..., self.keys] if strided is None else strided[index]

    def read_values(self, pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Values of whole pages, as :meth:`read_keys`."""
        strided = self._views[1].of(pages)
        return pages[index][..., self.values] if strided is None else strided[index]

    def copy(
        self,
        pages: torch.Tensor,
        source_page: torch.Tensor,
        source_slot: torch.Tensor,
        target_page: torch.Tensor,
    ) -> None:
        """Copy tokens to whole pages, which they fill in order.

        Every token is read before one is written, so targets may be among the sources.

        Args:
            pages: [num_pages, 2 * block_size * D], written in place.
            source_page: [K] int64.
            source_slot: [K] int64, slot of each token in its page.
            target_page: [K / block_size] int64, each once.

        """
        for view in self._views:
            shape = (-1, *view.offsets.shape)
            strided = view.of(pages)
            if strided is not None:
                strided[target_page] = strided[source_page, source_slot].view(shape)
            else:
                tokens = pages[source_page[:, None], view.offsets[source_slot]]
                target = target_page[:, None, None].expand(-1, *view.offsets.shape)
                pages[target, view.offsets] = tokens.view(shape)


class _View:
    """Offsets [block_size, D], as a strided view of the pages where they are evenly spaced."""

    def __init__(self, offsets: torch.Tensor) -> None:
        self.offsets = offsets
        rows, columns = offsets.shape
        self.base = int(offsets[0, 0])
        self.token = int(offsets[1, 0]) - self.base if rows > 1 else 1
        self.dim = int(offsets[0, 1]) - self.base if columns > 1 else 1
        even = self.base + torch.arange(rows)[:, None] * self.token
        self.even = torch.equal(even + torch.arange(columns) * self.dim, offsets)

    def of(self, pages: torch.Tensor) -> torch.Tensor | None:
        """[num_pages, block_size, D], sharing memory with ``pages``; None if not evenly spaced."""
        if not self.even:
            return None
        shape = (pages.shape[0], *self.offsets.shape)
        strides = (pages.stride(0), self.token, self.dim)
        return pages.as_strided(shape, strides, pages.storage_offset() + self.base)

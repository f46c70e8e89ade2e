"""Layout of keys and values in a head page, with functions that read and copy tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_kvevict.ops.cpu.lanes import Strides
from vllm_kvevict.ops.cpu.move import TokenMoves
from vllm_kvevict.ops.fp8 import typed

BASE = 16
"""Base of the digits in which elements are numbered: float8_e4m3fn represents integers up to 16."""

Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class PageLayout:
    """Element offsets of every (token, dimension) in a page of ``2 * block_size * D`` elements.

    A page of a latent cache has ``block_size * D`` elements, because values are a part of the keys.

    vLLM's CPU kernels store keys transposed or in tiles, depending on the instruction set, so
    the layout is measured once: a page is written with numbered elements and read back.

    Args:
        keys: [block_size, D] int64 offsets of the keys.
        values: [block_size, D] int64 offsets of the values, [block_size, 0] in a latent cache.

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
        """Measure the layout that a kernel writes.

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
        written = torch.zeros(2 * count, dtype=torch.int64)
        for digit in range(math.ceil(math.log(2 * count, BASE)) or 1):
            values = (numbers // BASE**digit % BASE).to(dtype).view(2, block_size, 1, head_size)
            cache = torch.zeros(1, 1, block_size, 2 * head_size, dtype=cache_dtype)
            write(values[0], values[1], cache)
            written += typed(cache).flatten().long() * BASE**digit
        order = written.argsort(stable=True)
        if not torch.equal(written[order], numbers):
            raise ValueError(
                "KV eviction cannot move tokens in this KV cache, because the attention kernel "
                f"packs {dtype} pages of {block_size} x {head_size} in a way that is not a "
                "permutation: serve this model without --kv-eviction."
            )
        offsets = order.view(2, block_size, head_size)
        return cls(offsets[0].contiguous(), offsets[1].contiguous())

    @classmethod
    def latent(cls, block_size: int, head_size: int) -> "PageLayout":
        """Return the layout of a latent cache, in which entries are contiguous."""
        entries = torch.arange(block_size * head_size).view(block_size, head_size)
        return cls(entries, entries[:, :0])

    @property
    def block_size(self) -> int:
        return self.keys.shape[0]

    @cached_property
    def _views(self) -> tuple["_View", ...]:
        return tuple(_View(part) for part in (self.keys, self.values) if part.numel())

    @cached_property
    def strides(self) -> tuple[Strides | None, ...]:
        """Offsets of the keys and of the values (none in a latent cache) by their strides; None for
        offsets that are not evenly spaced."""
        return tuple(
            Strides(view.base, view.shape, view.strides) if view.even else None
            for view in self._views
        )

    @cached_property
    def _moves(self) -> TokenMoves:
        return TokenMoves(torch.cat([self.keys, self.values], dim=-1))

    @cached_property
    def slot_size(self) -> int | None:
        """Number of elements of a token if tokens follow one another in a page, else None."""
        offsets = torch.cat([self.keys, self.values], dim=-1)
        order = torch.arange(offsets.numel(), device=offsets.device)
        follow = torch.equal(offsets, order.view_as(offsets))
        return offsets.shape[1] if follow else None

    def read_keys(self, pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the keys of pages.

        Args:
            pages: [num_pages, 2 * block_size * D]: a layer's cache as head pages.
            index: [...] int64 pages.

        Returns:
            [..., block_size, D] in the cache's dtype, a copy. If a page stores keys by dimension,
            the copy may be stored by dimension as well.

        """
        return self._views[0].read(pages, index)

    def read_values(self, pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the values of pages, with the arguments and result of :meth:`read_keys`."""
        return self._views[1].read(pages, index)

    def copy(
        self,
        pages: torch.Tensor,
        source_page: torch.Tensor,
        source_slot: torch.Tensor,
        target_page: torch.Tensor,
    ) -> None:
        """Copy tokens to pages, which they fill in order.

        All tokens are read before any is written, so targets may be among the sources.

        Args:
            pages: [num_pages, 2 * block_size * D], written in place.
            source_page: [K] int64.
            source_slot: [K] int64, slot of each token in its page.
            target_page: [K / block_size] int64, without duplicates.

        """
        if self.slot_size is not None and pages.shape[1] == self.block_size * self.slot_size:
            # Few operations: on a GPU, launches take longer than the copy.
            tokens = pages.view(-1, self.slot_size)
            moved = tokens.index_select(0, source_page * self.block_size + source_slot)
            pages.index_copy_(0, target_page, moved.view(-1, pages.shape[1]))
            return
        self._moves(pages, source_page, source_slot, target_page)


def _split(offsets: torch.Tensor) -> tuple[int, int, int, int] | None:
    """Return the outer and inner size of evenly spaced offsets and their strides, else None."""
    count = len(offsets)
    inner = 1
    while inner < count and int(offsets[inner]) == inner * int(offsets[1]):
        inner += 1
    if count % inner:
        return None
    steps = [int(offsets[inner]) if inner < count else 0, int(offsets[1]) if inner > 1 else 0]
    index = torch.arange(count)
    even = torch.equal(index // inner * steps[0] + index % inner * steps[1], offsets)
    return (count // inner, inner, steps[0], steps[1]) if even else None


class _View:
    """Offsets [block_size, D], as a strided view of the pages if they are evenly spaced.

    Kernels that store tiles group tokens and dimensions, so the view has an outer and an inner
    dimension for both.
    """

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]

    def __init__(self, offsets: torch.Tensor) -> None:
        self.offsets = offsets
        self.base = int(offsets[0, 0])
        tokens, dims = offsets[:, 0] - self.base, offsets[0] - self.base
        by_token, by_dim = _split(tokens), _split(dims)
        self.even = False
        if by_token and by_dim:
            self.even = torch.equal(offsets, offsets[:, :1] + dims)
            self.shape = (*by_token[:2], *by_dim[:2])
            self.strides = (*by_token[2:], *by_dim[2:])
            # Dimensions of the view from the largest stride to the smallest, which is memory order.
            self.order = sorted(range(4), key=lambda dim: -self.strides[dim])

    def strided(self, pages: torch.Tensor) -> torch.Tensor | None:
        """Return a view of pages; None if the offsets are not evenly spaced.

        Returns:
            [num_pages, groups of tokens, tokens in a group, groups of dims, dims in a group].

        """
        if not self.even:
            return None
        strides = (pages.stride(0), *self.strides)
        first = pages.storage_offset() + self.base
        return pages.as_strided((pages.shape[0], *self.shape), strides, first)

    def read(self, pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return a copy [..., block_size, D] of pages ``index``, in memory order if even."""
        strided = self.strided(pages)
        if strided is None:
            return pages[index][..., self.offsets]
        read = self._read_pages(strided, index.flatten())
        return read.reshape(*index.shape, *self.offsets.shape)

    def _read_pages(self, strided: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return a copy of pages ``index`` [P] of :meth:`strided`, in memory order."""
        read = self._ordered(strided).index_select(0, index)
        return read.permute(0, *(1 + self.order.index(dim) for dim in range(4)))

    def _ordered(self, strided: torch.Tensor) -> torch.Tensor:
        return strided.permute(0, *(1 + dim for dim in self.order))

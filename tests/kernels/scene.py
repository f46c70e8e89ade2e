"""Random paged caches with requests that are due, for the emulated kernels and for a GPU alike.

What no kernel may read is NaN in caches and absurd in tables.
"""

from dataclasses import dataclass
from random import Random

import torch

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.ops.cuda.batch import Due, EvictionBatch
from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat

ABSURD = -12345


@dataclass(frozen=True)
class Lengths:
    """One request: blocks of the old store, old tail start and tail start in blocks, tokens."""

    old_store: int
    old_tail: int
    tail: int
    num_tokens: int
    store: int
    protect_first: int = 0


@dataclass(frozen=True)
class Shape:
    """Sizes of a scene; ``slot`` elements a (token, head), twice the head size if 0."""

    layers: int
    heads: int
    block_size: int
    head_size: int
    window: int
    requests: tuple[Lengths, ...]
    dtype: torch.dtype = torch.float32
    slot: int = 0
    stored: TokenFormat = AS_CACHED

    @property
    def page_tokens(self) -> int:
        """Tokens in a page of a store."""
        return self.stored.page_tokens(self.block_size)


class Scene:
    """Caches, state tables and batch of a :class:`Shape` on a device."""

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.random = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        layers, heads, bs = shape.layers, shape.heads, shape.block_size
        blocks = sum(
            r.old_store + -(-r.num_tokens // bs) - r.old_tail + r.store for r in shape.requests
        )
        self.num_blocks = blocks + 3
        fresh = iter(self.random.sample(range(self.num_blocks), self.num_blocks))

        def take(count: int) -> list[int]:
            return [next(fresh) for _ in range(count)]

        rows = self.random.sample(range(len(shape.requests) + 2), len(shape.requests))
        widest = max(1, *(r.old_store for r in shape.requests))
        # Where no store is, a split is left over: more pages than there are.
        stale = 1000 * torch.arange(heads + 1, dtype=torch.int32)
        self.head_indptr = stale.repeat(layers, len(rows) + 2, 1)
        stores = torch.full((len(rows) + 2, widest + 1), ABSURD, dtype=torch.int32)
        self.tail_start = torch.full((len(rows) + 2,), ABSURD, dtype=torch.int32)
        due = []
        self._used: set[int] = set()
        for row, lengths in zip(rows, shape.requests, strict=True):
            store, target = take(lengths.old_store), take(lengths.store)
            positional = take(-(-lengths.num_tokens // bs) - lengths.old_tail)
            self._used.update(store, positional)
            stores[row, : len(store)] = torch.tensor(store, dtype=torch.int32)
            self.tail_start[row] = lengths.old_tail * bs
            for layer in range(layers):
                if store:
                    most = lengths.old_tail * bs // shape.page_tokens
                    split = self.split(lengths.old_store * heads, [most] * heads)
                    indptr = torch.tensor([0, *split]).cumsum(0)
                    self.head_indptr[layer, row] = indptr.int()
            due.append(
                Due(
                    row=row,
                    ring=row,
                    num_tokens=lengths.num_tokens,
                    old_tail_start=lengths.old_tail * bs,
                    tail_start=lengths.tail * bs,
                    old_store_blocks=lengths.old_store,
                    positional=positional,
                    store=target,
                    protect_first=lengths.protect_first,
                )
            )
        self.due = due
        # Wider than what is used, as the worker's table is.
        self.stores = stores.to(self.device)[:, :widest]
        self.caches = [self._cache() for _ in range(layers)]
        self.centres: torch.Tensor | None = None
        if not shape.stored.as_cached:
            drawn = torch.randn(layers, heads, shape.head_size, generator=self.generator)
            self.centres = (3 * drawn).to(self.device)
        self.head_indptr = self.head_indptr.to(self.device)
        self.tail_start = self.tail_start.to(self.device)
        self.batch = self.batch_of(due)

    def batch_of(self, due: list[Due]) -> EvictionBatch:
        """The batch of evictions of these requests."""
        shape = self.shape
        sizes = shape.layers, shape.heads, shape.block_size, shape.window, self.device
        return EvictionBatch.build(due, *sizes, shape.page_tokens)

    def split(self, total: int, caps: list[int]) -> list[int]:
        """A random share for every head, at least 1, at most its cap, summing to ``total``."""
        shares = []
        for index, cap in enumerate(caps):
            after = caps[index + 1 :]
            low, high = max(1, total - sum(after)), min(cap, total - len(after))
            # Every other head keeps as little or as much as it may.
            choice = self.random.choice([low, high, self.random.randint(low, high)])
            shares.append(choice)
            total -= choice
        return shares

    def normal(self, *sizes: int) -> torch.Tensor:
        """Standard normal numbers [*sizes] in the scene's dtype (float32 for FP8)."""
        dtype = self.shape.dtype if self.shape.dtype.itemsize > 1 else torch.float32
        return torch.randn(sizes, generator=self.generator).to(dtype).to(self.device)

    def indptr(self, due: Due) -> torch.Tensor:
        """[L, H + 1] split of a request, zeros where it has no store. On the CPU."""
        split = self.head_indptr[:, due.row].cpu()
        return split if due.old_store_blocks else torch.zeros_like(split)

    def store(self, due: Due) -> torch.Tensor:
        """[S] old store of a request. On the CPU."""
        return self.stores[due.row, : due.old_store_blocks].cpu()

    def caps(self, due: Due) -> torch.Tensor:
        """[L, H] int64 pages of a store that the candidates of each head fill."""
        return self.columns(due) // self.shape.page_tokens

    def columns(self, due: Due) -> torch.Tensor:
        """[L, H] int64 candidates of each head."""
        stored = self.indptr(due).diff(dim=-1).long() * self.shape.page_tokens
        return stored + due.tail_start - due.old_tail_start

    def layer_cache(self, layer: int, cache: torch.Tensor | None = None) -> LayerCache:
        """One layer's cache, or another one like it, as PyTorch operations take it. On the CPU."""
        shape = self.shape
        tokens = torch.arange(shape.block_size)[:, None] * 2 * shape.head_size
        keys = tokens + torch.arange(shape.head_size)
        pages = (self.caches[layer] if cache is None else cache).cpu().flatten(0, 1).flatten(1)
        layout = PageLayout(keys, keys + shape.head_size)
        centres = None if self.centres is None else self.centres[layer].cpu()
        return LayerCache(pages, layout, 1.0, 0.0, token_format=shape.stored, centres=centres)

    def _cache(self) -> torch.Tensor:
        shape = self.shape
        slot = shape.slot or 2 * shape.head_size
        sizes = (self.num_blocks, shape.heads, shape.block_size, slot)
        if shape.dtype == torch.uint8:
            values = torch.randint(0, 256, sizes, generator=self.generator)
            return values.to(shape.dtype).to(self.device)
        cache = torch.randn(sizes, generator=self.generator)
        unused = [block for block in range(self.num_blocks) if block not in self._used]
        cache[unused] = float("nan")
        for due in self.due:
            beyond = (due.num_tokens - due.old_tail_start) % shape.block_size
            if beyond:
                cache[due.positional[-1], :, beyond:] = float("nan")
        cache = cache.to(shape.dtype)
        if not shape.stored.as_cached:
            self._pack(cache)
        return cache.to(self.device)

    def _pack(self, cache: torch.Tensor) -> None:
        """Fill the pages of stores with random tokens in their format, and their rest with ones."""
        shape = self.shape
        blocks = [block for due in self.due for block in self.store(due).tolist()]
        pages = cache.view(torch.uint8).flatten(2)
        for page in (pages[block, head] for block in blocks for head in range(shape.heads)):
            sizes = shape.page_tokens, shape.head_size
            keys, values = (torch.randn(sizes, generator=self.generator) for _ in range(2))
            planes = [plane.flatten() for plane in shape.stored.encode(keys, values)]
            packed = torch.cat(planes)
            page.fill_(255)
            page[: len(packed)] = packed

"""Random paged caches with requests that are due, for the emulated kernels and for a GPU alike.

What no kernel may read is NaN in caches and absurd in tables.
"""

from dataclasses import dataclass
from random import Random

import torch

from vllm_kvevict.ops.cuda.batch import Due, EvictionBatch

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
                    split = self.split(lengths.old_store * heads, [lengths.old_tail] * heads)
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
        self.caches = [self._cache() for _ in range(layers)]
        self.head_indptr = self.head_indptr.to(self.device)
        # Wider than what is used, as the worker's table is.
        self.stores = stores.to(self.device)[:, :widest]
        self.tail_start = self.tail_start.to(self.device)
        self.batch = EvictionBatch.build(due, layers, heads, bs, shape.window, self.device)

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
        """[L, H] int64 pages of candidates of each head."""
        tail_pages = (due.tail_start - due.old_tail_start) // self.shape.block_size
        return self.indptr(due).diff(dim=-1).long() + tail_pages

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
        return cache.to(shape.dtype).to(self.device)

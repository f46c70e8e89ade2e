"""The due evictions of a step, as one table on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Due:
    """One request's eviction. Blocks are vLLM's physical block ids.

    Args:
        row: The request's row of the state tables.
        ring: Ring slot with the queries of its last w tokens; 0 if no queries are recorded.
        num_tokens: n, tokens in the cache.
        old_tail_start: T of its last eviction in tokens, 0 for none.
        tail_start: T of this eviction in tokens.
        old_store_blocks: Number of blocks of its store, 0 for none.
        positional: Blocks from the old tail start to the end of the request.
        store: Blocks to fill.
        protect_first: Number of first tokens that are kept regardless of their scores.
        in_place: True if blocks of ``store`` are among ``positional`` or in the old store.

    """

    row: int
    ring: int
    num_tokens: int
    old_tail_start: int
    tail_start: int
    old_store_blocks: int
    positional: Sequence[int]
    store: Sequence[int]
    protect_first: int = 0
    in_place: bool = False

    def check(self, block_size: int, window: int, page_tokens: int) -> None:
        """Raise ValueError if the fields contradict one another."""
        tail_pages = (self.tail_start - self.old_tail_start) // page_tokens
        rules = {
            "tail starts must be multiples of the block size": (
                self.tail_start % block_size == self.old_tail_start % block_size == 0
            ),
            "tail starts must not decrease or exceed the number of tokens": (
                0 <= self.old_tail_start <= self.tail_start <= self.num_tokens
                and window <= self.num_tokens
            ),
            "a request has a store if it has a tail start": (
                (self.old_store_blocks > 0) == (self.old_tail_start > 0)
            ),
            "positional blocks must hold the tokens after the old tail start": (
                len(self.positional) * block_size >= self.num_tokens - self.old_tail_start
            ),
            "the store must have at least one block and no more than its candidates fill": (
                1 <= len(self.store) <= self.old_store_blocks + tail_pages
            ),
            "row, ring and protected tokens must not be negative": (
                min(self.row, self.ring, self.protect_first) >= 0
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"{rule}: {self}")


@dataclass(frozen=True)
class EvictionBatch:
    """E due evictions of one KV-cache group.

    The input of the kernels in addition to the state tables. The host knows lengths and block ids,
    and so all sizes; only the device knows which head owns which page. The candidates of a
    (request, layer) are concatenated by head without padding:
    ``(S_old * page_tokens + tail tokens) * H`` columns.

    Args:
        due: The evictions.
        num_layers: L.
        num_heads: H, KV heads on this rank.
        block_size: Tokens in a page of the tail.
        page_tokens: Tokens in a page of a store.
        window: w.
        requests: [E, 11] int64 fields of ``csrc/request.h``.
        positional: [E, P] int32, padded with 0 for requests with fewer blocks.
        store: [E, S] int32, padded with 0 for requests with fewer blocks.
        columns: Candidate columns of all requests, which is the length of the flat scores.
        sums: ``columns`` plus the columns between the tail start and the window.
        kept_columns: Survivors of all requests.
        max_columns: Upper bound of the cached tokens of any head.

    """

    due: tuple[Due, ...]
    num_layers: int
    num_heads: int
    block_size: int
    page_tokens: int
    window: int
    requests: torch.Tensor
    positional: torch.Tensor
    store: torch.Tensor
    columns: int
    sums: int
    kept_columns: int
    max_columns: int

    @property
    def rows(self) -> torch.Tensor:
        """[E] int64 rows of the state tables, on the device."""
        return self.requests[:, 0]

    @property
    def tail_starts(self) -> torch.Tensor:
        """[E] int64 T in tokens, on the device."""
        return self.requests[:, 4]

    @classmethod
    def build(
        cls,
        due: Sequence[Due],
        num_layers: int,
        num_heads: int,
        block_size: int,
        window: int,
        device: torch.device,
        page_tokens: int | None = None,
    ) -> "EvictionBatch":
        """Lay out a batch, with three small asynchronous copies to the device.

        Raises:
            ValueError: There is no eviction, or the fields of an eviction contradict each other.

        """
        size = page_tokens or block_size
        if not due:
            raise ValueError("a batch needs at least one eviction")
        for eviction in due:
            eviction.check(block_size, window, size)
        heads = num_layers * num_heads
        columns = [
            heads * (d.old_store_blocks * size + d.tail_start - d.old_tail_start) for d in due
        ]
        rest = [heads * max(0, d.num_tokens - window - d.tail_start) for d in due]
        sums = [c + r for c, r in zip(columns, rest, strict=True)]
        kept = [heads * len(d.store) * size for d in due]
        first = zip(*(accumulate(sizes, initial=0) for sizes in (columns, sums, kept)), strict=True)
        requests = [
            (
                d.row,
                d.ring,
                d.num_tokens,
                d.old_tail_start,
                d.tail_start,
                d.old_store_blocks,
                len(d.store),
                d.protect_first,
                *starts,
            )
            for d, starts in zip(due, first, strict=False)
        ]
        return cls(
            due=tuple(due),
            num_layers=num_layers,
            num_heads=num_heads,
            block_size=block_size,
            page_tokens=size,
            window=window,
            requests=to_device(requests, torch.int64, device),
            positional=to_device(_padded([d.positional for d in due]), torch.int32, device),
            store=to_device(_padded([d.store for d in due]), torch.int32, device),
            columns=sum(columns),
            sums=sum(sums),
            kept_columns=sum(kept),
            max_columns=max(_max_columns(d, num_heads, size) for d in due),
        )


def _max_columns(due: Due, num_heads: int, page_tokens: int) -> int:
    """Return an upper bound of the cached tokens of any head.

    A head has at most all store pages except one for each other head, and at most as many tokens as
    the request had before its tail.
    """
    pages = max(0, (due.old_store_blocks - 1) * num_heads + 1)
    return min(pages * page_tokens, due.old_tail_start) + due.num_tokens - due.old_tail_start


def _padded(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max(map(len, rows))
    return [[*row, *[0] * (width - len(row))] for row in rows]


def to_device(
    rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Copy rows of equal length to the device asynchronously."""
    pinned = torch.tensor(rows, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)

"""The evictions that are due after a step, as one table on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Due:
    """One request's eviction. Blocks are vLLM's physical block ids.

    Args:
        row: The request's row of the state tables.
        ring: Ring slot with the queries of its last w tokens; 0 for a policy without.
        num_tokens: n, tokens in the cache.
        old_tail_start: T of its last eviction in tokens, 0 for none.
        tail_start: T of this one.
        old_store_blocks: Blocks of its store, 0 for none.
        positional: Blocks from the old tail start to the end of the request.
        store: Blocks to fill.
        protect_first: Tokens that stay whatever their score.
        in_place: Whether blocks of ``store`` are among ``positional`` or in the old store.

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

    def check(self, block_size: int, window: int) -> None:
        """Raise ValueError where the numbers contradict one another."""
        tail_pages = (self.tail_start - self.old_tail_start) // block_size
        known = {
            "tail starts must be multiples of the block size": (
                self.tail_start % block_size == self.old_tail_start % block_size == 0
            ),
            "tail starts must not fall, nor pass the window's end": (
                0 <= self.old_tail_start <= self.tail_start <= self.num_tokens
                and window <= self.num_tokens
            ),
            "a request has a store if it has a tail start": (
                (self.old_store_blocks > 0) == (self.old_tail_start > 0)
            ),
            "positional blocks must hold the tokens behind the old tail start": (
                len(self.positional) * block_size >= self.num_tokens - self.old_tail_start
            ),
            "the store must have a block, and no more than there are candidates": (
                1 <= len(self.store) <= self.old_store_blocks + tail_pages
            ),
            "row, ring and protected tokens must not be negative": (
                min(self.row, self.ring, self.protect_first) >= 0
            ),
        }
        for rule, holds in known.items():
            if not holds:
                raise ValueError(f"{rule}: {self}")


@dataclass(frozen=True)
class EvictionBatch:
    """E due evictions of one KV-cache group.

    What the kernels need besides the state tables. Lengths and block ids are known to the host, so
    all sizes are; which head owns which page stays on the device. Candidates of a (request, layer)
    lie one head after another without padding: ``(S_old + tail pages) * H * block_size`` columns.

    Args:
        due: The evictions.
        num_layers: L.
        num_heads: H, KV heads on this rank.
        block_size: Tokens in a page.
        window: w.
        requests: [E, 11] int64: ``csrc/request.h``.
        positional: [E, P] int32, 0 where a request has fewer blocks.
        store: [E, S] int32, 0 where a request has fewer blocks.
        columns: Candidate columns of all requests: length of the flat scores.
        sums: The same with the columns between the tail start and the window.
        kept_columns: Survivors of all requests.
        max_columns: At least the cached tokens of any head.

    """

    due: tuple[Due, ...]
    num_layers: int
    num_heads: int
    block_size: int
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
    ) -> "EvictionBatch":
        """Lay out a batch; three small copies to the device, none waited for.

        Raises:
            ValueError: No eviction, or one that contradicts itself.

        """
        if not due:
            raise ValueError("a batch needs at least one eviction")
        for one in due:
            one.check(block_size, window)
        heads = num_layers * num_heads
        columns = [
            heads * (one.old_store_blocks * block_size + one.tail_start - one.old_tail_start)
            for one in due
        ]
        rest = [heads * max(0, one.num_tokens - window - one.tail_start) for one in due]
        sums = [c + r for c, r in zip(columns, rest, strict=True)]
        kept = [heads * len(one.store) * block_size for one in due]
        first = zip(*(accumulate(sizes, initial=0) for sizes in (columns, sums, kept)), strict=True)
        requests = [
            (
                one.row,
                one.ring,
                one.num_tokens,
                one.old_tail_start,
                one.tail_start,
                one.old_store_blocks,
                len(one.store),
                one.protect_first,
                *starts,
            )
            for one, starts in zip(due, first, strict=False)
        ]
        return cls(
            due=tuple(due),
            num_layers=num_layers,
            num_heads=num_heads,
            block_size=block_size,
            window=window,
            requests=to_device(requests, torch.int64, device),
            positional=to_device(_padded([one.positional for one in due]), torch.int32, device),
            store=to_device(_padded([one.store for one in due]), torch.int32, device),
            columns=sum(columns),
            sums=sum(sums),
            kept_columns=sum(kept),
            max_columns=max(_most_columns(one, num_heads, block_size) for one in due),
        )


def _most_columns(due: Due, num_heads: int, block_size: int) -> int:
    """At least the cached tokens of any head.

    A head has at most all store pages but one for each other head, and never more than the
    request had blocks before its tail.
    """
    pages = max(0, (due.old_store_blocks - 1) * num_heads + 1)
    return min(pages * block_size, due.old_tail_start) + due.num_tokens - due.old_tail_start


def _padded(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max(map(len, rows))
    return [[*row, *[0] * (width - len(row))] for row in rows]


def to_device(
    rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Rows of one length on the device, in a copy that nobody waits for."""
    pinned = torch.tensor(rows, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)

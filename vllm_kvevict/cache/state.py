"""Eviction state of the requests of one KV-cache group, on the device."""

from collections.abc import Mapping, Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvevict.rules.rule import EvictionRule, blocks_for


class GroupState:
    """Tail start, store and head split of every request of a group, one row per request.

    The runner adapter (``worker/runners.py``) assigns the rows. ``tail_start`` is 0 for a request
    that is not evicted.

    Args:
        group_id: Index of vLLM's KV-cache group.
        layer_names: The group's layers, in order.
        rule: The group's eviction rule.
        num_heads: H, KV heads on this rank.
        num_rows: Maximum number of requests that the worker holds at once.
        max_model_len: Longest sequence in tokens. It bounds the size of a store.
        device: Device of the tables.
        num_slots: Maximum number of published stores for which the head split is kept.
        sharing: Name of the layer that owns the cache, for layers without a cache of their own.
            They read the store of an owner in this group.

    """

    def __init__(
        self,
        group_id: int,
        layer_names: Sequence[str],
        rule: EvictionRule,
        num_heads: int,
        num_rows: int,
        max_model_len: int,
        device: torch.device,
        num_slots: int = 0,
        sharing: Mapping[str, str] | None = None,
    ) -> None:
        self.group_id = group_id
        self.layer_names = list(layer_names)
        self.layer_index = {name: index for index, name in enumerate(layer_names)}
        """Index of each layer's store. Layers that share a cache share the index."""
        for name, owner in (sharing or {}).items():
            if owner in self.layer_index:
                self.layer_index[name] = self.layer_index[owner]
        self.rule = rule
        self.num_heads = num_heads
        # A store never has more blocks than the tokens before the tail start fill.
        max_blocks = max(1, blocks_for(max_model_len, rule.block_size))

        def table(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tail_start = table(num_rows)
        self.evicted = torch.zeros(num_rows, dtype=torch.bool)
        """[rows] on the host: True if ``tail_start`` is above 0."""
        self.shorter = torch.zeros(num_rows, dtype=torch.int64)
        """[rows] on the host: lower bound of the evicted tokens of every head."""
        self.weighted = torch.zeros(num_rows, dtype=torch.bool)
        """[rows] on the host: True if token stats hold log-weights of the store's tokens."""
        self._stores = table(num_rows, max_blocks)
        self.store = self._stores[:, :1]
        """[rows, S] block ids, as wide as the widest store so far."""
        self.head_indptr = table(len(layer_names), num_rows, num_heads + 1)
        self._kept = table(len(layer_names), num_slots, num_heads + 1)

    def owner(self, layer_name: str) -> str:
        """Return the layer that owns the cache of a layer: itself, unless it shares a cache."""
        return self.layer_names[self.layer_index[layer_name]]

    @property
    def stores(self) -> torch.Tensor:
        """[rows, blocks of the longest store] block ids, at a fixed address."""
        return self._stores

    @property
    def num_bytes(self) -> int:
        tables = (self.tail_start, self._stores, self.head_indptr, self._kept)
        return sum(table.numel() * table.element_size() for table in tables)

    def clear(self, rows: Sequence[int]) -> None:
        """Reset these rows to not evicted, without waiting for the device."""
        cleared = torch.as_tensor(rows, dtype=torch.int64)
        cleared = cleared[self.evicted[cleared]]
        if len(cleared):
            self.evicted[cleared] = False
            self.weighted[cleared] = False
            index = async_tensor_h2d(cleared, device=self.tail_start.device)
            self.tail_start.index_fill_(0, index, 0)

    def reset(self) -> None:
        """Reset all rows to not evicted, whatever the tables hold."""
        for table in (self.tail_start, self._stores, self.head_indptr, self._kept):
            table.zero_()
        for flags in (self.evicted, self.shorter, self.weighted):
            flags.zero_()

    def splits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the head splits [L, R, H + 1] int32 of ``rows`` [R]; zeros if not evicted."""
        return self.head_indptr[:, rows] * (self.tail_start[rows] > 0)[:, None]

    def indptr(self, row: int) -> torch.Tensor:
        """Return the head split [L, H + 1] int32 of a row; zeros if it is not evicted."""
        split = self.head_indptr[:, row]
        return split if bool(self.evicted[row]) else torch.zeros_like(split)

    def record(
        self,
        row: int,
        tail_start: int,
        store: torch.Tensor,
        pages: torch.Tensor,
        weighted: bool = False,
    ) -> None:
        """Record an eviction, without waiting for the device.

        Args:
            row: The request's row.
            tail_start: T in tokens.
            store: [S] int block ids.
            pages: [L, H] int64, each row summing to S * H.
            weighted: True if token stats hold log-weights of the store's tokens.

        """
        # The first column is 0 in every row.
        self.head_indptr[:, row, 1:] = pages.cumsum(-1)
        self._enter(row, tail_start, store, weighted)

    def record_all(
        self,
        evictions: Sequence[tuple[int, int, int]],
        rows: torch.Tensor,
        tail_starts: torch.Tensor,
        stores: torch.Tensor,
        pages: torch.Tensor,
    ) -> None:
        """Record the evictions of E requests, in as many launches as one eviction takes.

        Args:
            evictions: Row, T in tokens and number of store blocks of each; rows are distinct.
            rows: [E] int64 rows, on the device.
            tail_starts: [E] int64 T, on the device.
            stores: [E, S] int32 block ids. Entries after a shorter store are never read.
            pages: [E, L, H] int32, each row summing to the pages of its store.

        """
        self.head_indptr[:, rows, 1:] = pages.cumsum(-1, dtype=torch.int32).transpose(0, 1)
        self._stores[:, : stores.shape[1]].index_copy_(0, rows, stores)
        self.tail_start.index_copy_(0, rows, tail_starts.int())
        for row, tail_start, blocks in evictions:
            self._enter_on_host(row, tail_start, blocks, weighted=False)

    def keep(self, row: int, slot: int) -> None:
        """Keep a row's head split for other requests, without waiting for the device."""
        self._kept[:, slot] = self.head_indptr[:, row]

    def split_kept(self, slot: int) -> torch.Tensor:
        """Return a view of the head split [L, H + 1] int32 that :meth:`keep` wrote to a slot."""
        return self._kept[:, slot]

    def take(self, row: int, slot: int, tail_start: int, store: torch.Tensor) -> None:
        """Give a request a published store, without waiting for the device.

        Args:
            row: Row of the request.
            slot: Slot to which :meth:`keep` wrote the head split.
            tail_start: T in tokens.
            store: [S] int block ids.

        """
        self.head_indptr[:, row] = self._kept[:, slot]
        self._enter(row, tail_start, store, weighted=False)

    def _enter(self, row: int, tail_start: int, store: torch.Tensor, weighted: bool) -> None:
        blocks = store.shape[0]
        self._stores[row, :blocks] = store
        # Assigning a number to an element would copy it from pageable memory, which waits.
        self.tail_start[row].fill_(tail_start)
        self._enter_on_host(row, tail_start, blocks, weighted)

    def _enter_on_host(self, row: int, tail_start: int, blocks: int, weighted: bool) -> None:
        if blocks > self.store.shape[1]:
            self.store = self._stores[:, :blocks]
        self.weighted[row] = weighted
        self.evicted[row] = tail_start > 0
        max_stored = blocks * self.num_heads * self.rule.page_tokens
        self.shorter[row] = max(0, tail_start - max_stored)

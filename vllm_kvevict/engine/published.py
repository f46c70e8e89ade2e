"""Published stores, which several requests may hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from vllm_kvevict.stores.key import ShareKey

if TYPE_CHECKING:
    from vllm_kvevict.rules.progress import EvictionProgress


@dataclass(frozen=True)
class PublishedGroup:
    """The blocks of a store in one KV-cache group, and the positional blocks after it.

    ``store`` is empty and ``tail_start`` 0 if the group had nothing to evict. Layers that attend
    within a window do not evict either; their ``tail`` is what the token after the point reads.
    """

    tail_start: int
    store: tuple[KVCacheBlock, ...]
    tail: tuple[KVCacheBlock, ...]


@dataclass(eq=False)
class PublishedStore:
    """A compressed context up to an eviction point. ``hashes`` are those of all its blocks.

    ``suffix`` holds full blocks that were computed over the store, with their hashes. It has one
    block per group, keyed by vLLM's hash of all tokens up to the end of the block.
    """

    key: ShareKey
    groups: Mapping[int, PublishedGroup]
    hashes: list[tuple[KVCacheBlock, bytes]]
    suffix: dict[BlockHash, list[tuple[KVCacheBlock, bytes]]] = field(default_factory=dict)
    counted_idle: bool = False
    """True if the store was idle when it was last examined."""
    starts: int = 0
    """Number of requests that have started with the store."""
    awaited: set[str] = field(default_factory=set)
    """Ids of requests that returned to the queue for the store, until they start."""
    superseded: bool = False
    """True if its request has evicted past it and no other is expected to start with it."""
    again: bool = False
    """True if an equal store was made before, and is gone."""
    written: bool = False
    """True if the store is in files, or is being written and has not failed."""

    def advance(self, progress: "Mapping[int, EvictionProgress]") -> None:
        """Advance the progress of a request that starts with this store past the store's
        evictions."""
        for group_progress in progress.values():
            if group_progress.is_due(self.key.point):
                group_progress.evict(self.key.point)

    @property
    def intact(self) -> bool:
        """True if no block was reused. vLLM's pool removes the hash of a block that it hands
        out."""
        return all(block.block_hash == expected for block, expected in self.hashes)

    def suffix_blocks(self, key: BlockHash) -> tuple[KVCacheBlock | None, ...] | None:
        """Return one block per group that was computed over the store, with None for those that
        were reused; None if nothing was published."""
        if (blocks := self.suffix.get(key)) is None:
            return None
        return tuple(block if block.block_hash == mark else None for block, mark in blocks)

    @cached_property
    def _ends(self) -> list[tuple[KVCacheBlock, bytes]]:
        lists = [blocks for group in self.groups.values() for blocks in (group.store, group.tail)]
        ends = {blocks[end].block_id for blocks in lists if blocks for end in (0, -1)}
        return [(block, expected) for block, expected in self.hashes if block.block_id in ends]

    @property
    def ends_intact(self) -> bool:
        """True if the first and last blocks of each list were not reused.

        This is enough for reports: blocks are held and freed together, and vLLM's pool reuses them
        in the order in which they were freed.
        """
        return all(block.block_hash == expected for block, expected in self._ends)

    @property
    def held(self) -> bool:
        return any(group.store[0].ref_cnt for group in self.groups.values() if group.store)

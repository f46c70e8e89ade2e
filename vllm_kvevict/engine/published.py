"""A store that several requests may hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from vllm_kvevict.stores.key import ShareKey

if TYPE_CHECKING:
    from vllm_kvevict.timeline.progress import EvictionProgress


@dataclass(frozen=True)
class PublishedGroup:
    """What a store is in one KV-cache group: its blocks, and the positional ones after it.

    ``store`` is empty and ``tail_start`` 0 where the group had nothing to evict.
    """

    tail_start: int
    store: tuple[KVCacheBlock, ...]
    tail: tuple[KVCacheBlock, ...]


@dataclass(eq=False)
class PublishedStore:
    """A context up to an eviction point, compressed. ``hashes`` are those of all its blocks.

    ``suffix`` has full blocks that were computed over it and their hashes, one of each group, by
    vLLM's hash of all tokens up to their end.
    """

    key: ShareKey
    groups: dict[int, PublishedGroup]
    hashes: list[tuple[KVCacheBlock, bytes]]
    suffix: dict[BlockHash, list[tuple[KVCacheBlock, bytes]]] = field(default_factory=dict)
    counted_idle: bool = False
    """Whether it was idle when it was last looked at."""
    written: bool = False
    """Whether it is in files, or is being written and no failure of that is known."""

    def advance(self, timelines: "Mapping[int, EvictionProgress]") -> None:
        """Let the timelines of a request that begins with it stand behind its evictions."""
        for timeline in timelines.values():
            if timeline.is_due(self.key.point):
                timeline.evict(self.key.point)

    @property
    def intact(self) -> bool:
        """Whether every block is still what it was: vLLM's pool takes the hash with the block."""
        return all(block.block_hash == expected for block, expected in self.hashes)

    def suffix_blocks(self, key: BlockHash) -> tuple[KVCacheBlock, ...] | None:
        """A block of each group that was computed over it, if all are still what they were."""
        found = self.suffix.get(key)
        if found is None or any(block.block_hash != expected for block, expected in found):
            return None
        return tuple(block for block, _ in found)

    @cached_property
    def _ends(self) -> list[tuple[KVCacheBlock, bytes]]:
        lists = [blocks for one in self.groups.values() for blocks in (one.store, one.tail)]
        ends = {blocks[end].block_id for blocks in lists if blocks for end in (0, -1)}
        return [(block, expected) for block, expected in self.hashes if block.block_id in ends]

    @property
    def whole(self) -> bool:
        """As :attr:`intact`, by the ends of its lists of blocks only.

        Enough for reports: blocks are held and freed together, and vLLM's pool takes them in the
        order they were freed in.
        """
        return all(block.block_hash == expected for block, expected in self._ends)

    @property
    def held(self) -> bool:
        return any(one.store[0].ref_cnt for one in self.groups.values() if one.store)

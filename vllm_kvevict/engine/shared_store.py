"""A store that several requests may hold, and what it depends on."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock


@dataclass(frozen=True)
class ShareKey:
    """Requests with equal keys evict at one point to equal stores.

    What is the same for a whole server (model, window, block size, groups of layers) is no part.

    Args:
        prefix: vLLM's hash of the whole blocks before the point. It covers their tokens, the LoRA
            adapter, the cache salt, images and embeddings.
        rest: Tokens between those blocks and the point.
        extra: What vLLM hashes beside these tokens.
        point: The eviction point, in tokens.
        policy: Who decides.
        protect_first: Tokens that stay whatever the policy says.
        stores: S of every KV-cache group, or 0 where a group has nothing to evict at the point.
        prepare: Tokens that read the context before it was evicted; empty for none.

    """

    prefix: bytes
    rest: tuple[int, ...]
    extra: tuple[Any, ...] | None
    point: int
    policy: str
    protect_first: int
    stores: tuple[tuple[int, int], ...]
    prepare: tuple[int, ...] = ()


@dataclass(frozen=True)
class SharedGroup:
    """What a store is in one KV-cache group: its blocks, and the positional ones behind it.

    ``store`` is empty and ``tail_start`` 0 where the group had nothing to evict.
    """

    tail_start: int
    store: tuple[KVCacheBlock, ...]
    tail: tuple[KVCacheBlock, ...]


@dataclass(eq=False)
class SharedStore:
    """A context up to an eviction point, compressed. ``hashes`` are those of all its blocks.

    ``behind`` has full blocks that were computed over it and their hashes, one of each group, by
    vLLM's hash of all tokens up to their end.
    """

    key: ShareKey
    groups: dict[int, SharedGroup]
    hashes: list[tuple[KVCacheBlock, bytes]]
    behind: dict[BlockHash, list[tuple[KVCacheBlock, bytes]]] = field(default_factory=dict)

    @property
    def intact(self) -> bool:
        """Whether every block is still what it was: vLLM's pool takes the hash with the block."""
        return all(block.block_hash == expected for block, expected in self.hashes)

    def found_behind(self, key: BlockHash) -> tuple[KVCacheBlock, ...] | None:
        """A block of each group behind the store, if all are still what they were."""
        found = self.behind.get(key)
        if found is None or any(block.block_hash != expected for block, expected in found):
            return None
        return tuple(block for block, _ in found)

    @cached_property
    def _ends(self) -> list[tuple[KVCacheBlock, bytes]]:
        lists = [blocks for one in self.groups.values() for blocks in (one.store, one.tail)]
        ends = {blocks[end].block_id for blocks in lists if blocks for end in (0, -1)}
        return [(block, expected) for block, expected in self.hashes if block.block_id in ends]

    @property
    def idle(self) -> bool:
        """Whether the store is there and nobody holds it.

        Asked of all stores at every report, so it looks at the ends of their lists only: blocks
        are held and freed together, and vLLM's pool takes them in the order they were freed in.
        """
        held = any(one.store[0].ref_cnt for one in self.groups.values() if one.store)
        return not held and all(block.block_hash == expected for block, expected in self._ends)

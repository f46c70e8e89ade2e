"""A store that several requests may hold, and what it depends on."""

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock


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

    """

    prefix: bytes
    rest: tuple[int, ...]
    extra: tuple[Any, ...] | None
    point: int
    policy: str
    protect_first: int
    stores: tuple[tuple[int, int], ...]


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
    """A context up to an eviction point, compressed. ``hashes`` are those of all its blocks."""

    key: ShareKey
    groups: dict[int, SharedGroup]
    hashes: list[tuple[KVCacheBlock, bytes]]

    @property
    def intact(self) -> bool:
        """Whether every block is still what it was: vLLM's pool takes the hash with the block."""
        return all(block.block_hash == expected for block, expected in self.hashes)

    @property
    def idle(self) -> bool:
        """Whether the store is there and nobody holds it."""
        held = any(block.ref_cnt for one in self.groups.values() for block in one.store)
        return not held and self.intact

"""A store that several requests may hold, and what it depends on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, generate_block_hash_extra_keys

from vllm_kvevict.schedule.request_timeline import RequestTimeline

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, eq=False)
class ShareKey:
    """Requests with equal keys evict at one point to equal stores.

    What is the same for a whole server (model, window, block size, groups of layers) is no part.
    Keys are compared by a digest, since a thousand waiting requests may have the same one.

    Args:
        prefix: vLLM's hash of the whole blocks before the point. It covers their tokens, the LoRA
            adapter, the cache salt, images and embeddings.
        rest: Tokens between those blocks and the point.
        extra: What vLLM hashes beside these tokens.
        point: The eviction point, in tokens.
        policy: The policy that chooses.
        protect_first: Tokens that stay whatever the policy chooses.
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

    @cached_property
    def digest(self) -> bytes:
        parts = self.rest, self.extra, self.point, self.policy, self.protect_first, self.stores
        return sha256(repr((self.prefix, *parts, self.prepare)).encode()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShareKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


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


def share_key(
    request: "Request",
    timelines: Mapping[int, RequestTimeline],
    hash_block_size: int,
    policy: str,
    protect_first: int,
    prepare: tuple[int, ...],
) -> ShareKey | None:
    """The key of a request that evicts at a point of its own; None for all others.

    Args:
        request: vLLM's request, whose blocks are hashed as far as they are full.
        timelines: Its timelines before anything was evicted, by KV-cache group.
        hash_block_size: Tokens that one of these hashes covers.
        policy: The policy that chooses.
        protect_first: Tokens that stay whatever the policy chooses.
        prepare: Tokens that read its context before it is evicted; empty for none.

    """
    stops = [stop for t in timelines.values() if (stop := t.stop(0)) is not None]
    point = min(stops, default=request.num_tokens)
    if point >= request.num_tokens:
        return None
    blocks = point // hash_block_size
    if not 0 < blocks <= len(request.block_hashes):
        return None
    if any(timeline.looks_before(point) for timeline in timelines.values()):
        return None
    hashed = blocks * hash_block_size
    extra = None
    if hashed < point:
        extra = generate_block_hash_extra_keys(request, hashed, point, 0)[0]
    stores = tuple(
        (group, timeline.wanted(point) if timeline.is_due(point) else 0)
        for group, timeline in sorted(timelines.items())
    )
    return ShareKey(
        prefix=request.block_hashes[blocks - 1],
        rest=tuple(request.all_token_ids[hashed:point]),
        extra=extra,
        point=point,
        policy=policy,
        protect_first=protect_first,
        stores=stores,
        # Where nothing is evicted, nothing is to be prepared.
        prepare=prepare if any(blocks for _, blocks in stores) else (),
    )

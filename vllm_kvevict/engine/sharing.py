"""Stores that evictions at a point leave, and the requests that take them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)

from vllm_kvevict.engine.behind import Behind
from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.engine.options import prepared_by
from vllm_kvevict.engine.share_key import share_key
from vllm_kvevict.engine.shared_store import SharedGroup, SharedStore, ShareKey
from vllm_kvevict.schedule.step_plan import GroupEviction, TakenStore
from vllm_kvevict.schedule.timeline import blocks_for

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

KEY = "_kv_eviction_share_key"
"""Attribute of vLLM's ``Request`` that keeps its key, or None for a request that never shares."""
MOST_GIVEN_UP = 256
"""Keys that are remembered because a request came to the point and could not evict there."""


class SharedStores:
    """Finds stores for requests, and publishes those that evictions make.

    A published store is held by those who took it, and by its maker. Its blocks carry a hash that
    no prefix leads to, so vLLM's pool keeps them like cached blocks when nobody holds them: they
    leave least recently used first, and a store that lost one block is never found again.

    Args:
        manager: vLLM's.
        ledger: Timelines of all admitted requests.
        managers: The block managers that evict, by KV-cache group.
        unshared: Policies whose stores depend on more than a key says.
        enabled: Whether stores may be shared at all.

    """

    def __init__(
        self,
        manager: "KVCacheManager",
        ledger: EvictionLedger,
        managers: Mapping[int, EvictableAttentionManager],
        unshared: frozenset[str],
        enabled: bool,
    ) -> None:
        self._manager = manager
        self._ledger = ledger
        self._managers = managers
        self._unshared = unshared
        # Layers that do not evict have no blocks for a prefix that is skipped.
        every_group = len(managers) == len(manager.coordinator.single_type_managers)
        self._enabled = enabled and manager.enable_caching and every_group
        self._published: dict[ShareKey, SharedStore] = {}
        self._by_block: dict[int, SharedStore] = {}
        self._given_up: dict[ShareKey, None] = {}
        self._made = 0
        self.behind = Behind(manager.block_pool.hash_block_size, managers)
        for one in managers.values():
            one.on_reuse = self._reused

    @property
    def idle(self) -> int:
        """Published stores that nobody holds."""
        return sum(store.idle for store in self._published.values())

    def key(self, request: "Request") -> ShareKey | None:
        """What the store of a request depends on; None where it shares none."""
        if not self._enabled:
            return None
        if not hasattr(request, KEY):
            entry = self._ledger.fresh_entry(request)
            found = None
            if entry is not None and entry.policy not in self._unshared:
                size = self._manager.block_pool.hash_block_size
                found = share_key(request, entry, size, prepared_by(self._ledger.options(request)))
            setattr(request, KEY, found)
        key: ShareKey | None = getattr(request, KEY)
        return key

    def waits(self, request: "Request", running: "Sequence[Request]") -> bool:
        """Whether somebody else is about to make the store that a waiting request would make.

        ``running`` are vLLM's requests, those last that this step let in.
        """
        ledger = self._ledger
        for other in reversed(running):
            if other.request_id in ledger.entries:
                break
            ledger.admit(other.request_id)
        if not ledger.prefilling or request.num_computed_tokens:
            return False
        key = self.key(request)
        if (
            key is None
            or key.prepare
            or key in self._given_up
            or not self._manager.prefix_cache_lookup_enabled(request)
        ):
            return False
        return any(
            ledger.requests[other].num_computed_tokens < key.point
            and self.key(ledger.requests[other]) == key
            for other in ledger.prefilling
        )

    def has(self, key: ShareKey) -> bool:
        """Whether the store of a key is there, as a whole."""
        shared = self._published.get(key)
        if shared is None:
            return False
        if not shared.intact:
            self._drop(shared)
            return False
        return True

    def find(self, request: "Request") -> "tuple[KVCacheBlocks, int] | None":
        """Blocks and tokens that a request takes instead of computing them; None for none.

        The request takes them for certain only when it is admitted.
        """
        self._ledger.taking.pop(request.request_id, None)
        key = self.key(request)
        if (
            key is None
            or not self._manager.prefix_cache_lookup_enabled(request)
            or self._ledger.options(request).context is not None
            or not self.has(key)
        ):
            return None
        shared = self._published[key]
        self._ledger.taking[request.request_id] = shared
        most = self._ledger.hit_cap_taking(request)
        behind, num_tokens = self.behind.find(request, shared, most)
        null = self._manager.block_pool.null_block
        blocks: list[Sequence[KVCacheBlock]] = []
        for index, (group, one) in enumerate(sorted(shared.groups.items())):
            size = self._managers[group].block_size
            tail = one.tail
            if behind:
                whole = (key.point - one.tail_start) // size
                tail = *tail[:whole], *(each[index] for each in behind)
            blocks.append([*[null] * (one.tail_start // size), *tail])
        return self._manager.create_kv_cache_blocks(tuple(blocks)), num_tokens

    def taken(self, request_id: str) -> list[TakenStore]:
        """What the worker must know of the store that a request took when it was admitted."""
        shared: SharedStore = self._ledger.taking.pop(request_id)
        return [
            TakenStore(group, one.tail_start, [block.block_id for block in one.store])
            for group, one in shared.groups.items()
            if one.store
        ]

    def publish(
        self, request: "Request", entry: Entry, end: int, evictions: Sequence[GroupEviction]
    ) -> bool:
        """Let others take what a request keeps, after its evictions of the step ending at ``end``.

        Only where they are what the request's key says, and every block behind the store is whole
        or the last one. A request that prepares a context publishes that alone, not what read it.

        Returns:
            Whether the store is published; the worker must then keep how heads share it.

        """
        key = self.key(request)
        made = {eviction.group_id: eviction for eviction in evictions}
        point = entry.context or end
        if (
            key is None
            or key.point != point
            or bool(key.prepare) != (entry.context is not None)
            or entry.computed_valid != end
            or any(one.old_tail_start or one.old_store for one in evictions)
            or made.keys() != {group for group, blocks in key.stores if blocks}
        ):
            return False
        former = self._published.get(key)
        if former is not None and former.intact:
            return False
        groups = {}
        for group in entry.timelines:
            tail_start = made[group].tail_start if group in made else 0
            size = self._managers[group].block_size
            positional = self._managers[group].req_to_blocks[request.request_id]
            tail = positional[tail_start // size : blocks_for(point, size)]
            whole = tail[: (point - tail_start) // size]
            if any(block.block_hash is None for block in whole):
                return False
            cut = len(tail) > len(whole) and entry.context is None
            if cut and tail[-1].block_hash is not None:
                return False
            store = (
                self._managers[group].holdings[request.request_id].store if group in made else ()
            )
            groups[group] = SharedGroup(tail_start, tuple(store), tuple(tail))
        shared = self._enter(key, groups)
        if entry.context is None:
            entry.hold(shared)
        return True

    def renew(self, shared: SharedStore) -> None:
        """Let a store that was in use until now leave the pool after what was computed over it."""
        if shared.intact:
            idle = [block for block, _ in shared.hashes if block.ref_cnt == 0]
            self._manager.block_pool.touch(idle)
            self._manager.block_pool.free_blocks(idle)

    def passed(self, request: "Request", end: int) -> None:
        """Note that a step ends at ``end``: at the point without a store, nobody waits for one."""
        key = self.key(request)
        if key is not None and not key.prepare and key.point == end and key not in self._published:
            if len(self._given_up) == MOST_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
            self._given_up[key] = None

    def _enter(self, key: ShareKey, groups: dict[int, SharedGroup]) -> SharedStore:
        self._made += 1
        self._given_up.pop(key, None)
        mark = BlockHash(b"kv_eviction store %d" % self._made)
        stored = [(group, block) for group, one in groups.items() for block in one.store]
        for block_id in [block.block_id for _, block in stored]:
            if (stale := self._by_block.get(block_id)) is not None:
                self._drop(stale)
        if (former := self._published.get(key)) is not None:
            self._drop(former)
        tails = [(group, block) for group, one in groups.items() for block in one.tail]
        for group, block in stored + tails:
            if block.block_hash is None:
                block.set_block_hash(make_block_hash_with_group_id(mark, group))
        hashes = [(block, block.block_hash or b"") for _, block in stored + tails]
        shared = self._published[key] = SharedStore(key, groups, hashes)
        for _, block in stored:
            self._by_block[block.block_id] = shared
        return shared

    def _reused(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Note that an eviction writes survivors to these blocks."""
        for block in blocks:
            if (shared := self._by_block.get(block.block_id)) is not None:
                self._drop(shared)

    def _drop(self, shared: SharedStore) -> None:
        """Forget a store; what is left of its blocks waits in the cache for nobody."""
        if self._published.get(shared.key) is shared:
            del self._published[shared.key]
        mine = {block.block_id for one in shared.groups.values() for block in one.store}
        for block_id in mine:
            if self._by_block.get(block_id) is shared:
                del self._by_block[block_id]
        self._manager.block_pool.evict_blocks(
            {b.block_id for b, mark in shared.hashes if b.block_id in mine and b.block_hash == mark}
        )

"""Stores that evictions at a point leave for other requests, and what is computed over them."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from vllm_kvevict.engine.blocks import EvictableAttentionManager, EvictionCore
from vllm_kvevict.engine.published import PublishedGroup, PublishedStore
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.stores.key import ShareKey, share_key
from vllm_kvevict.timeline.rule import blocks_for
from vllm_kvevict.timeline.step_plan import GroupEviction, ReusedStore, StepPlan

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

MOST_GIVEN_UP = 256
"""Keys that are remembered because a request came to the point and could not evict there."""

SWEEP = 16
"""Published stores that a step looks at: all of them take 22 to 25 ms at 14,000."""


class PublishedStores:
    """Finds stores for requests, and publishes those that evictions make.

    A published store is held by those who reuse it, and by its maker. Its blocks carry a hash that
    no prefix leads to, so vLLM's pool keeps them like cached blocks when they are idle: they
    leave least recently used first, and a store that lost one block is never found again.

    Args:
        core: What the engine works on.
        enabled: Whether stores may be shared at all.

    """

    def __init__(self, core: EvictionCore, enabled: bool) -> None:
        self._manager = manager = core.cache
        self._table = core.table
        self._managers = managers = core.managers
        # Layers that do not evict have no blocks for a prefix that is skipped.
        every_group = len(managers) == len(manager.coordinator.single_type_managers)
        self.enabled = enabled and manager.enable_caching and every_group
        self.idle = 0
        """Published stores that no request holds, as they were when last looked at."""
        self.kept_bytes = 0
        """Host memory that holds stores, on all ranks."""
        self.suffixes = SuffixCache(manager.block_pool.hash_block_size, managers)
        self._published: dict[ShareKey, PublishedStore] = {}
        self._by_block: dict[int, PublishedStore] = {}
        self._to_sweep: deque[PublishedStore] = deque()
        self._given_up: dict[ShareKey, None] = {}
        self._made = 0

    def read_key(self, state: RequestState) -> None:
        """Find what the store of a request that arrives depends on."""
        if not self.enabled or not state.needs.shares_stores or not state.has_eviction_points:
            return
        state.store_key = share_key(
            state.request,
            state.timelines,
            self._manager.block_pool.hash_block_size,
            state.options.policy,
            state.options.protect_first,
            state.needs.reads_share,
        )

    def waits(self, state: RequestState) -> bool:
        """Whether a running request is about to make the store that a waiting one lacks."""
        key = state.store_key
        if key is None or key in self._given_up or not self._may_reuse(state):
            return False
        return any(
            other.store_key is not None
            and other.store_key.point > other.request.num_computed_tokens
            and other.store_key == key
            for other in self._table.prefilling.values()
        ) and not self.has(key)

    def _may_reuse(self, state: RequestState) -> bool:
        return self._manager.prefix_cache_lookup_enabled(state.request)

    def _in_pool(self, key: ShareKey) -> bool:
        store = self._published.get(key)
        return store is not None and store.intact

    def has(self, key: ShareKey) -> bool:
        """Whether the store of a key is there, as a whole."""
        return self._in_pool(key)

    def copy(self, plan: StepPlan) -> None:
        """Tell the workers which stores are copied out of the KV cache, and back."""

    def reset(self) -> None:
        """What is in the KV cache may no longer be reused."""

    def executed(self, plan: StepPlan | None, news: Sequence[Any]) -> None:
        """Note that a step was executed.

        Args:
            plan: Its plan, if it had one.
            news: Reports of the workers about stores outside the KV cache.

        """

    def ended(self, state: RequestState) -> bool:
        """Note that a request ends, before its blocks are freed.

        Returns:
            Whether another server that takes the request over will find its store.

        """
        return False

    def find(self, state: RequestState) -> PublishedStore | None:
        """The store that a waiting request may begin with; None for none."""
        key = state.store_key
        if key is None or not self._in_pool(key):
            return None
        return self._published[key] if self._may_reuse(state) else None

    def hit(self, state: RequestState) -> "tuple[KVCacheBlocks, int]":
        """Blocks and tokens of the store that a request reuses, and of what continues it."""
        store = state.pending_store
        assert store is not None
        after, num_tokens = self.suffixes.find(state, store, state.reuse_cap)
        null = self._manager.block_pool.null_block
        blocks: list[Sequence[KVCacheBlock]] = []
        for index, (group, one) in enumerate(sorted(store.groups.items())):
            size = self._managers[group].block_size
            tail = one.tail
            if after:
                whole = (store.key.point - one.tail_start) // size
                tail = *tail[:whole], *(each[index] for each in after)
            blocks.append([*[null] * (one.tail_start // size), *tail])
        return self._manager.create_kv_cache_blocks(tuple(blocks)), num_tokens

    def publish(
        self, state: RequestState, end: int, evictions: Sequence[GroupEviction]
    ) -> PublishedStore | None:
        """Let others reuse what a request keeps, after its evictions of the step ending at ``end``.

        Only where they are what the request's key means, and every block after the store is whole
        or the last one.

        Returns:
            The store; the worker must then keep how heads share it. None where none is published.

        """
        key = state.store_key
        made = {eviction.group_id: eviction for eviction in evictions}
        if (
            key is None
            or key.point != end
            or state.computed_valid != end
            or any(one.old_tail_start or one.old_store for one in evictions)
            or made.keys() != {group for group, blocks in key.stores if blocks}
            or self._in_pool(key)
        ):
            return None
        groups = {}
        for group in state.timelines:
            tail_start = made[group].tail_start if group in made else 0
            size = self._managers[group].block_size
            positional = self._managers[group].req_to_blocks[state.request_id]
            tail = positional[tail_start // size : blocks_for(end, size)]
            whole = tail[: (end - tail_start) // size]
            if any(block.block_hash is None for block in whole):
                return None
            if len(tail) > len(whole) and tail[-1].block_hash is not None:
                return None
            blocks = state.holdings[group].store if group in made else ()
            groups[group] = PublishedGroup(tail_start, tuple(blocks), tuple(tail))
        return self._enter(key, groups)

    def renew(self, store: PublishedStore) -> None:
        """Let a store that was in use until now leave the pool after what was computed over it."""
        if store.intact:
            idle = [block for block, _ in store.hashes if block.ref_cnt == 0]
            self._manager.block_pool.touch(idle)
            self._manager.block_pool.free_blocks(idle)

    def passed(self, state: RequestState, end: int) -> None:
        """Note that a step ends at ``end``: at the point without a store, none is waited for."""
        key = state.store_key
        if key is not None and key.point == end and key not in self._published:
            if len(self._given_up) == MOST_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
            self._given_up[key] = None

    def plan(self, state: RequestState) -> list[ReusedStore]:
        """What the workers must know of the store that an admitted request reuses."""
        assert state.pending_store is not None
        return [
            ReusedStore(group, one.tail_start, [block.block_id for block in one.store])
            for group, one in state.pending_store.groups.items()
            if one.store
        ]

    def sweep(self) -> None:
        """Look at some of the stores: count idle ones, forget those that lost a block."""
        for _ in range(min(SWEEP, len(self._to_sweep))):
            store = self._to_sweep.popleft()
            if self._published.get(store.key) is not store:
                continue
            if not store.whole:
                self._drop(store)
                continue
            self._count_idle(store, not store.held)
            self._to_sweep.append(store)

    def _count_idle(self, store: PublishedStore, idle: bool) -> None:
        self.idle += idle - store.counted_idle
        store.counted_idle = idle

    def _enter(self, key: ShareKey, groups: dict[int, PublishedGroup]) -> PublishedStore:
        self._made += 1
        self._given_up.pop(key, None)
        mark = BlockHash(b"kv_eviction store %d" % self._made)
        stored = [(group, block) for group, one in groups.items() for block in one.store]
        self.overwritten(block.block_id for _, block in stored)
        if (former := self._published.get(key)) is not None:
            self._drop(former)
        tails = [(group, block) for group, one in groups.items() for block in one.tail]
        for group, block in stored + tails:
            if block.block_hash is None:
                block.set_block_hash(make_block_hash_with_group_id(mark, group))
        hashes = [(block, block.block_hash or b"") for _, block in stored + tails]
        store = self._published[key] = PublishedStore(key, groups, hashes)
        self._by_block |= {block.block_id: store for _, block in stored}
        self._to_sweep.append(store)
        return store

    def overwritten(self, block_ids: Iterable[int]) -> None:
        """Drop the stores that have one of these blocks, to which survivors are written."""
        for block_id in block_ids:
            if (store := self._by_block.get(block_id)) is not None:
                self._drop(store)

    def _drop(self, store: PublishedStore) -> None:
        """Forget a store; what is left of its blocks is ordinary free memory."""
        if self._published.get(store.key) is store:
            del self._published[store.key]
            self._count_idle(store, False)
        mine = {block.block_id for one in store.groups.values() for block in one.store}
        for block_id in mine:
            if self._by_block.get(block_id) is store:
                del self._by_block[block_id]
        self.suffixes.drop(store)
        self._manager.block_pool.evict_blocks(
            {b.block_id for b, mark in store.hashes if b.block_id in mine and b.block_hash == mark}
        )


class SuffixCache:
    """Publishes what requests compute between a store's point and their next eviction.

    It depends on the store and on all tokens, which vLLM's hash of a block covers. A turn of a chat
    over one context so reuses the turns before it. Published when the step that computes a block is
    scheduled as a whole: vLLM may preempt a request in the step that admits it.

    Args:
        hash_block_size: Tokens that one of vLLM's hashes covers.
        managers: The block managers that evict, by KV-cache group: all there are.

    """

    def __init__(
        self, hash_block_size: int, managers: Mapping[int, EvictableAttentionManager]
    ) -> None:
        self._size = hash_block_size
        self._managers = dict(sorted(managers.items()))
        self._enabled = all(one.block_size == self._size for one in managers.values())
        self._filled: list[tuple[RequestState, PublishedStore, int]] = []
        self._by_block: dict[int, tuple[PublishedStore, BlockHash]] = {}
        """Entries of all stores by the block of the first group that they are in."""
        self._made = 0

    def note(self, state: RequestState, num_tokens: int) -> None:
        """Note that a request's first ``num_tokens`` tokens are computed, or are about to be."""
        if state.base_store and num_tokens // self._size > state.suffix_published // self._size:
            self._filled.append((state, state.base_store, num_tokens))

    def publish(self) -> None:
        """Let others reuse what was noted of requests that still compute over the same store."""
        filled, self._filled = self._filled, []
        for state, store, num_tokens in filled:
            if state.holds_blocks and state.base_store is store and store.whole:
                full = min(num_tokens // self._size, len(state.request.block_hashes))
                for index in range(state.suffix_published // self._size, full):
                    self._enter(store, state, index)
                state.suffix_published = max(state.suffix_published, full * self._size)

    def _enter(self, store: PublishedStore, state: RequestState, index: int) -> None:
        key = state.request.block_hashes[index]
        if not self._enabled or store.suffix_blocks(key) is not None:
            return
        self._made += 1
        mark = BlockHash(b"kv_eviction store, suffix %d" % self._made)
        marked = []
        for group, manager in self._managers.items():
            block = manager.req_to_blocks[state.request_id][index]
            # The block that the point cuts belongs to the store.
            if block.block_hash is None:
                block.set_block_hash(make_block_hash_with_group_id(mark, group))
            marked.append((block, block.block_hash or b""))
        block_id = marked[0][0].block_id
        if (stale := self._by_block.get(block_id)) is not None:
            del stale[0].suffix[stale[1]]
        if (former := store.suffix.get(key)) is not None:
            # Published again: the blocks it was in serve others by now.
            del self._by_block[former[0][0].block_id]
        self._by_block[block_id] = store, key
        store.suffix[key] = marked

    def drop(self, store: PublishedStore) -> None:
        """Forget what was computed over a store that nobody finds any more."""
        for marked in store.suffix.values():
            del self._by_block[marked[0][0].block_id]
        store.suffix.clear()

    def find(
        self, state: RequestState, store: PublishedStore, most: int
    ) -> tuple[list[tuple[KVCacheBlock, ...]], int]:
        """What continues a store as a request does, up to ``most`` tokens.

        Returns:
            Blocks of all groups, the one that the point cuts included, and the tokens up to their
            end; none of them, and the point, where the first is not there.

        """
        found: list[tuple[KVCacheBlock, ...]] = []
        point = store.key.point
        first = point // self._size
        for key in state.request.block_hashes[first : most // self._size]:
            blocks = store.suffix_blocks(key)
            if blocks is None:
                break
            found.append(blocks)
        return found, (first + len(found)) * self._size if found else point

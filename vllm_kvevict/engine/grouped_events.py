"""KV-cache events that name what a prefix-cache hit may find: each block once, in all groups.

vLLM announces a block in each group by itself, and a prefix-cache hit needs it in all of them. An
eviction may remove a block from one group only, so a router that reads the events of one group, or
that counts them, would expect hits that do not exist. Here a block is announced when all groups
have it, and its removal as soon as one group has lost it. Both are still announced for every group,
so a router that follows the groups sees the same.

Requests that compute the same tokens at the same time fill several blocks with one hash. vLLM
announces each of them, and each removal, so a router that does not count them misses hits as soon
as the first one has left (vllm#55092). Here only the first one is announced, and the removal of
the last one. Routers that count and routers that do not therefore know the same.
"""

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

from vllm_kvevict.engine.blocks import EvictionCore

SAME = ("block_size", "lora_id", "lora_name", "medium", "session_id")
"""Fields that blocks of one event share."""


class GroupedEvents:
    """Translates the events that vLLM's cache manager hands out.

    Args:
        core: The engine core. Every KV-cache group has a manager that evicts.

    """

    def __init__(self, core: EvictionCore) -> None:
        manager, pool = core.cache, core.cache.block_pool
        self._groups = len(core.managers)
        self._blocks: dict[object, dict[int | None, BlockStored]] = {}
        """By the hash of a block: the event that announces it, of each group that has it."""
        self._repeated: list[KVCacheEvent] = []
        """Announcements of blocks that a request has found in the cache, which it asked for."""
        take: Callable[[], list[KVCacheEvent]] = manager.take_events
        remove, repeat = pool._emit_block_removed_events, pool.emit_cached_block_events

        def take_events() -> list[KVCacheEvent]:
            events = take()
            return self.translate(events) if events else events

        def emit_block_removed_events(block_hashes: list[Any]) -> None:
            if pool.enable_kv_cache_events:
                cached = pool.cached_block_hash_to_block
                block_hashes = [one for one in block_hashes if cached.get_one_block(one) is None]
            remove(block_hashes)

        def emit_cached_block_events(*args: Any, **kwargs: Any) -> None:
            before = len(pool.kv_event_queue)
            repeat(*args, **kwargs)
            self._repeated += pool.kv_event_queue[before:]

        manager.take_events = take_events
        pool._emit_block_removed_events = emit_block_removed_events
        pool.emit_cached_block_events = emit_cached_block_events

    def translate(self, events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
        """Return what a router may believe after ``events`` of single groups."""
        told: list[KVCacheEvent] = []
        for event in events:
            if isinstance(event, BlockStored):
                repeated = any(event is one for one in self._repeated)
                for block in _blocks(event):
                    self._stored(block, told, repeated)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._removed(block_hash, event, told)
            else:
                if isinstance(event, AllBlocksCleared):
                    self._blocks.clear()
                told.append(event)
        self._repeated.clear()
        return _joined(told)

    def _stored(self, block: BlockStored, told: list[KVCacheEvent], repeated: bool) -> None:
        known = self._blocks.setdefault(block.block_hashes[0], {})
        again = block.group_idx in known
        known[block.group_idx] = block
        if len(known) < self._groups:
            return
        if repeated:
            told.append(block)
        elif not again:
            told += known.values()

    def _removed(self, block_hash: object, event: BlockRemoved, told: list[KVCacheEvent]) -> None:
        known = self._blocks.get(block_hash)
        if known is None or event.group_idx not in known:
            return
        if len(known) == self._groups:
            for group in known:
                removed = copy(event)
                removed.block_hashes, removed.group_idx = [block_hash], group
                told.append(removed)
        del known[event.group_idx]
        if not known:
            del self._blocks[block_hash]


def _blocks(event: BlockStored) -> Iterable[BlockStored]:
    """Yield an event for each block of an event."""
    if len(event.block_hashes) == 1:
        yield event
        return
    size, parent = event.block_size, event.parent_block_hash
    for index, block_hash in enumerate(event.block_hashes):
        block = copy(event)
        block.block_hashes, block.parent_block_hash = [block_hash], parent
        block.token_ids = event.token_ids[index * size : (index + 1) * size]
        if event.extra_keys is not None:
            block.extra_keys = event.extra_keys[index : index + 1]
        parent = block_hash
        yield block


def _joined(events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
    """Return the events with successive blocks of one group in one event."""
    joined: list[KVCacheEvent] = []
    last: dict[int | None, BlockStored] = {}
    for event in events:
        if not isinstance(event, BlockStored):
            last.clear()
            joined.append(event)
            continue
        former = last.get(event.group_idx)
        if former is not None and _continues(former, event):
            former.block_hashes += event.block_hashes
            former.token_ids += event.token_ids
            if former.extra_keys is not None and event.extra_keys is not None:
                former.extra_keys += event.extra_keys
            continue
        event = copy(event)
        event.block_hashes, event.token_ids = list(event.block_hashes), list(event.token_ids)
        if event.extra_keys is not None:
            event.extra_keys = list(event.extra_keys)
        last[event.group_idx] = event
        joined.append(event)
    return joined


def _continues(former: BlockStored, block: BlockStored) -> bool:
    if block.parent_block_hash is None or block.parent_block_hash != former.block_hashes[-1]:
        return False
    if (former.extra_keys is None) != (block.extra_keys is None):
        return False
    return all(getattr(former, name) == getattr(block, name) for name in SAME)

"""KV-cache events of servers with several groups of layers.

vLLM announces a block in each group by itself, and a prefix-cache hit needs it in all of them. An
eviction may remove a block from one group only, so a router that reads the events of one group, or
that counts them, would expect hits that do not exist. Here a block is announced when all groups
have it, and its removal as soon as one group has lost it. Both are still announced for every group,
so a router that follows the groups sees the same.
"""

from collections.abc import Callable, Iterable
from copy import copy

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

from vllm_kvevict.engine.blocks import EvictionCore

SAME = ("block_size", "lora_id", "lora_name", "medium", "session_id")
"""Fields that blocks of one event share."""


class GroupedEvents:
    """Translates the events that vLLM's cache manager hands out.

    Args:
        core: The engine core. Every KV-cache group has a manager that evicts, and there are
            several.

    """

    def __init__(self, core: EvictionCore) -> None:
        manager = core.cache
        self._groups = len(core.managers)
        self._blocks: dict[object, dict[int | None, BlockStored]] = {}
        """By the hash of a block: the event that announces it, of each group that has it."""
        take: Callable[[], list[KVCacheEvent]] = manager.take_events

        def take_events() -> list[KVCacheEvent]:
            events = take()
            return self.translate(events) if events else events

        manager.take_events = take_events

    def translate(self, events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
        """Return what a router may believe after ``events`` of single groups."""
        told: list[KVCacheEvent] = []
        for event in events:
            if isinstance(event, BlockStored):
                for block in _blocks(event):
                    self._stored(block, told)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._removed(block_hash, event, told)
            else:
                if isinstance(event, AllBlocksCleared):
                    self._blocks.clear()
                told.append(event)
        return _joined(told)

    def _stored(self, block: BlockStored, told: list[KVCacheEvent]) -> None:
        known = self._blocks.setdefault(block.block_hashes[0], {})
        again = len(known) == self._groups
        known[block.group_idx] = block
        if again:
            told.append(block)
        elif len(known) == self._groups:
            told += known.values()

    def _removed(self, block_hash: object, event: BlockRemoved, told: list[KVCacheEvent]) -> None:
        known = self._blocks.get(block_hash)
        if known is None or event.group_idx not in known:
            # Another block with this hash has already been removed.
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

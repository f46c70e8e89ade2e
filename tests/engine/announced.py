"""What a router that follows vLLM's KV-cache events believes to be in the prefix cache."""

from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)


class Announced:
    """Replays the events of a pool.

    vLLM announces the removal of a block also where another one has the same hash: the router then
    misses a hit. It must never believe in one that is not there, so a block that an eviction
    overwrites must be announced as removed, and a store must not be announced at all.

    Args:
        pool: vLLM's, whose scheduler takes events, too.
        published: Whether :meth:`replay` gets what a scheduler publishes; else all is taken here.

    """

    def __init__(self, pool: Any, published: bool = False) -> None:
        self._pool = pool
        self._take = (list) if published else pool.take_events
        if not published:
            pool.enable_kv_cache_events = True
            pool.take_events = self._follow
        self._believed: set[tuple[Any, Any]] = set()
        self._removed: set[tuple[Any, Any]] = set()
        self._names: dict[Any, tuple[Any, Any]] = {}
        self.events = 0

    def _name(self, one: Any) -> tuple[Any, Any]:
        """How events name what the prefix cache has; vLLM reads the environment each time."""
        self._names[one] = maybe_convert_block_hash(get_block_hash(one)), get_group_id(one)
        return self._names[one]

    def _follow(self) -> list[Any]:
        events = list(self._take())
        self.replay(events)
        return events

    def replay(self, events: list[Any]) -> None:
        """Believe what events say."""
        for event in events:
            self.events += 1
            if isinstance(event, AllBlocksCleared):
                self._believed.clear()
                continue
            assert isinstance(event, BlockStored | BlockRemoved)
            named = {(one, event.group_idx) for one in event.block_hashes}
            if isinstance(event, BlockStored):
                self._believed |= named
            else:
                self._believed -= named
                self._removed |= named

    def check(self) -> None:
        """Compare what the events so far say with what the pool has."""
        self._follow()
        there = {
            self._names.get(one) or self._name(one)
            for one in self._pool.cached_block_hash_to_block._cache
        }
        assert self._believed <= there, "a block is announced that is not in the prefix cache"
        assert there - self._believed <= self._removed, "a block was never announced"

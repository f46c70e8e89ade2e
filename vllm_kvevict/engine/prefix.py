"""What of an evicting request may come from the prefix cache, and what may go into it."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.sharing import SharedStores
from vllm_kvevict.metrics.counters import Counters

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

    Hit = tuple[KVCacheBlocks, int, int, bool]

CAPPED = "_kv_eviction_hit_capped"
"""Attribute of vLLM's ``Request`` whose hit was shortened."""


class PrefixCaps:
    """Caps prefix-cache hits, and what is published by hash.

    Args:
        manager: vLLM's, whose coordinator publishes only what :class:`EvictionLedger` allows
            from here on. All groups publish through it, also those that do not evict.
        ledger: Timelines of all admitted requests.
        shared: Published stores, which go before any hit.
        counters: Totals, counted here.

    """

    def __init__(
        self,
        manager: "KVCacheManager",
        ledger: EvictionLedger,
        shared: SharedStores,
        counters: Counters,
    ) -> None:
        self._manager = manager
        self._shared = shared
        self._ledger = ledger
        self._counters = counters
        self._cap = sys.maxsize
        publish = manager.coordinator.cache_blocks
        find = manager.coordinator.find_longest_cache_hit

        entries, taking = ledger.entries, ledger.taking
        size = manager.block_pool.hash_block_size

        def cache_blocks(request: "Request", num_computed_tokens: int) -> None:
            entry = entries.get(request.request_id)
            if entry is None and request.request_id in taking:
                # What follows a store is computed over it from the first step on.
                entry = ledger.admit(request.request_id)
            if entry is None:
                publish(request, num_computed_tokens)
                return
            tokens = entry.cacheable(num_computed_tokens)
            # Nothing new can be published before a hash's tokens are complete.
            if tokens // size > entry.published // size:
                publish(request, tokens)
                entry.published = tokens
            shared.behind.note(request, entry, num_computed_tokens)

        def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int) -> Any:
            return find(block_hashes, min(max_cache_hit_length, self._cap))

        manager.coordinator.cache_blocks = cache_blocks
        manager.coordinator.find_longest_cache_hit = find_longest_cache_hit

    def capped(self, request: "Request", look_up: "Callable[[Request], Hit]") -> "Hit":
        """A published store, or a hit without the observation window and what follows a point.

        Args:
            request: The request.
            look_up: ``Scheduler._get_local_prefix_cache_hit``, which looks no further than that.

        """
        taken = self._shared.find(request)
        if taken is not None:
            return (*taken, 0, False)
        self._cap = self._ledger.hit_cap(request)
        try:
            hit = look_up(request)
        finally:
            self._cap, cap = sys.maxsize, self._cap
        if cap < request.num_tokens - 1 and self._goes_on(request, hit[1]):
            self._count(request)
        return hit

    def _goes_on(self, request: "Request", num_tokens: int) -> bool:
        """Whether the block behind a hit is in the cache, too."""
        manager = self._manager
        index = num_tokens // manager.block_pool.hash_block_size
        if not manager.prefix_cache_lookup_enabled(request) or index >= len(request.block_hashes):
            return False
        groups = list(self._ledger.rules)
        found = manager.block_pool.get_cached_block(request.block_hashes[index], groups)
        return found is not None

    def _count(self, request: "Request") -> None:
        """Once for a request, however often it is looked up before it is admitted."""
        if not getattr(request, CAPPED, False):
            setattr(request, CAPPED, True)
            self._counters.prefix_hits_capped += 1

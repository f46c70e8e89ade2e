"""Limits on what an evicting request takes from the prefix cache, and on what it publishes.

No published block is ever written. Blocks with tokens that were computed after an eviction are
never published under vLLM's hash of the prefix. A hit is capped so that the queries of the
observation window are computed. Freed blocks of a prompt keep their hash until vLLM reuses them.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.request import Phase, RequestState
from vllm_kvevict.engine.stores import PublishedStores

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    Hit = tuple[KVCacheBlocks, int, int, bool]


class PrefixCaps:
    """Limits prefix-cache hits, and the blocks that are published by hash.

    This is the only class that wraps methods of vLLM's coordinator. A waiting request is admitted
    with its first blocks. From then on, every group, evicting or not, publishes only the tokens
    that :meth:`RequestState.cacheable` allows.

    Args:
        core: The engine core.
        stores: Published stores, which take precedence over prefix-cache hits.

    """

    def __init__(self, core: EvictionCore, stores: PublishedStores) -> None:
        self._manager = manager = core.cache
        self._core = core
        self._table = core.table
        self._stores = stores
        self._counters = core.counters
        self._cap = sys.maxsize
        publish = manager.coordinator.cache_blocks
        find = manager.coordinator.find_longest_cache_hit
        allocate = manager.coordinator.allocate_new_blocks

        states, size = core.table.states, manager.block_pool.hash_block_size
        waiting = Phase.WAITING

        # Called for every request in every step, after its blocks are allocated.
        def cache_blocks(request: "Request", num_computed_tokens: int) -> None:
            state = states.get(request.request_id)
            if state is not None and num_computed_tokens < state.publish_at:
                return
            if state is not None and state.phase is waiting:
                if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                    # Other requests may have taken what was free when the load began.
                    core.begin(state)
                else:
                    core.admit(state, num_computed_tokens)
            if state is not None and state.replay_store is not None:
                return
            if state is None or not state.progress:
                publish(request, num_computed_tokens)
                return
            tokens = state.cacheable(num_computed_tokens)
            publish(request, tokens)
            if state.base_store is not None:
                stores.suffixes.note(state, num_computed_tokens)
            elif tokens < num_computed_tokens:
                state.publish_at = sys.maxsize
            else:
                # No further block can be published before all tokens of a hash are computed.
                state.publish_at = (tokens // size + 1) * size

        def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int) -> Any:
            return find(block_hashes, min(max_cache_hit_length, self._cap))

        def allocate_new_blocks(request_id: str, *args: Any) -> Any:
            allocated = allocate(request_id, *args)
            state = states.get(request_id)
            if state is not None and state.phase is waiting:
                # Without caching, no block is shared, and nothing is reserved.
                core.begin(state)
            return allocated

        if not manager.enable_caching:
            manager.coordinator.allocate_new_blocks = allocate_new_blocks
        manager.coordinator.cache_blocks = cache_blocks
        manager.coordinator.find_longest_cache_hit = find_longest_cache_hit

    def look_up(self, request: "Request", look_up: "Callable[[Request], Hit]") -> "Hit":
        """Return a published store, or a prefix-cache hit that excludes the window and all tokens
        after an eviction point.

        Args:
            request: The waiting request.
            look_up: ``Scheduler._get_local_prefix_cache_hit``; it searches no further than the
                limit.

        """
        state = self._table.states.get(request.request_id)
        if state is None:
            return look_up(request)
        state.begin(state.replay_store or self._stores.find(state))
        self._core.consider(state)
        if state.pending_store is not None:
            return (*self._stores.hit(state), 0, False)
        self._cap = cap = state.hit_cap
        try:
            hit = look_up(request)
        finally:
            self._cap = sys.maxsize
        if cap < request.num_tokens - 1 and not state.hit_capped:
            # Counted once per request, even if it is looked up several times before it is admitted.
            state.hit_capped = self._goes_on(state, hit[1])
            self._counters.prefix_hits_capped += state.hit_capped
        return hit

    def _goes_on(self, state: RequestState, num_tokens: int) -> bool:
        """Return whether the block after a hit is in the cache, too."""
        manager, request = self._manager, state.request
        index = num_tokens // manager.block_pool.hash_block_size
        if not manager.prefix_cache_lookup_enabled(request) or index >= len(request.block_hashes):
            return False
        block_hash, groups = request.block_hashes[index], list(self._table.rules)
        return manager.block_pool.get_cached_block(block_hash, groups) is not None

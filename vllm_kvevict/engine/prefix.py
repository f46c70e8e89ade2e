"""What of an evicting request may come from the prefix cache, and what may go into it."""

from typing import TYPE_CHECKING

from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.metrics.counters import Counters

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

    Hit = tuple[KVCacheBlocks, int, int, bool]


class PrefixCaps:
    """Caps prefix-cache hits, and what is published by hash.

    Args:
        manager: vLLM's, whose coordinator publishes only what :class:`EvictionLedger` allows
            from here on. All groups publish through it, also those that do not evict.
        ledger: Timelines of all admitted requests.
        counters: Totals, counted here.

    """

    def __init__(
        self, manager: "KVCacheManager", ledger: EvictionLedger, counters: Counters
    ) -> None:
        self._manager = manager
        self._ledger = ledger
        self._counters = counters
        publish = manager.coordinator.cache_blocks

        def cache_blocks(request: "Request", num_computed_tokens: int) -> None:
            publish(request, ledger.cacheable(request.request_id, num_computed_tokens))

        manager.coordinator.cache_blocks = cache_blocks

    def capped(self, request: "Request", hit: "Hit") -> "Hit":
        """A hit without the observation window, and what follows an eviction point.

        Args:
            request: The request.
            hit: What ``Scheduler._get_local_prefix_cache_hit`` found.

        """
        cap = self._ledger.hit_cap(request)
        if hit[1] <= cap:
            return hit
        self._counters.prefix_hits_capped += 1
        blocks, num_tokens, uncached = self._manager.coordinator.find_longest_cache_hit(
            request.block_hashes, cap
        )
        boundary = num_tokens + uncached if uncached else 0
        return self._manager.create_kv_cache_blocks(blocks), num_tokens, boundary, hit[3]

"""vLLM's schedulers with eviction and with tiers behind the KV cache."""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.scheduler import EvictionMixin
from vllm_kvevict.policies.requirements import page_channels
from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.settings.handover import TAKEN_OVER
from vllm_kvevict.settings.store_tiers import parse_size
from vllm_kvevict.stores.fingerprint import store_files
from vllm_kvevict.stores.shape import StoreSizes
from vllm_kvevict.tiers.stores import TieredStores

if TYPE_CHECKING:
    from vllm.v1.request import Request


class TieredMixin(EvictionMixin):
    """Keeps published stores outside the KV cache as well."""

    def _make_stores(self, core: EvictionCore, enabled: bool, config: EvictionConfig) -> Any:
        """The stores.

        Raises:
            ValueError: In one sentence, why this server shares none.

        """
        if not config.has_tiers:
            return super()._make_stores(core, enabled, config)
        groups = dict(enumerate(self.kv_cache_config.kv_cache_groups))
        if (
            not enabled
            or not self.cache_config.enable_prefix_caching
            or len(groups) > len(self._evicting)
        ):
            raise ValueError(
                "KV eviction: --kv-eviction-store-memory and --kv-eviction-store-path keep stores "
                "that requests share, and this server shares none: it needs prefix caching, layers "
                "that all evict, and no draft model."
            )
        sizes = StoreSizes(
            {group: one.kv_cache_spec for group, one in groups.items()},
            {group: len(one.layer_names) for group, one in groups.items()},
            page_channels(config),
            pinned=self.vllm_config.device_config.device_type == "cuda",
        )
        return TieredStores(
            core,
            sizes,
            self.vllm_config.parallel_config.world_size,
            parse_size(config.store_memory),
            store_files(self.vllm_config, self.kv_cache_config, config),
        )

    def _free_request(self, request: "Request", *args: Any, **kwargs: Any) -> Any:
        state, stores = self._table.states[request.request_id], self._stores
        handed = False
        if isinstance(stores, TieredStores):
            handed = stores.hands_over(state)
            stores.leave(state)
        params, other = super()._free_request(request, *args, **kwargs)
        return (dict(TAKEN_OVER) if handed else params), other


class TieredScheduler(TieredMixin):
    """vLLM's synchronous scheduler with eviction and tiers."""


class TieredAsyncScheduler(TieredMixin, AsyncScheduler):
    """vLLM's async scheduler with eviction and tiers."""

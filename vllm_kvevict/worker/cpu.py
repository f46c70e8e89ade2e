"""vLLM's CPU worker with eviction."""

from functools import lru_cache
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvevict.attention.latent import EvictingLatentImpl
from vllm_kvevict.attention.stored import warm_up
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.cache.spec import EvictableLatentSpec
from vllm_kvevict.worker.centres import key_centres, warn_of_lost_keys
from vllm_kvevict.worker.eviction import WorkerEviction
from vllm_kvevict.worker.mixin import EvictionWorkerMixin, sinks_of


class EvictingCPUWorker(EvictionWorkerMixin, CPUWorker):
    """The worker of one CPU rank: the eviction mixin comes before vLLM's CPU worker in the MRO."""

    def _register_backend(self) -> None:
        register_backend(
            AttentionBackendEnum.CPU_ATTN, "vllm_kvevict.attention.cpu_backend.EvictingCPUBackend"
        )
        register_backend(
            AttentionBackendEnum.CPU_MLA, "vllm_kvevict.attention.latent.EvictingLatentBackend"
        )
        # An engine without eviction may have run in this process and chosen vLLM's backend.
        selector._cached_get_attn_backend.cache_clear()

    def _layer_cache(self, layer: Any, spec: AttentionSpec) -> LayerCache:
        cache: torch.Tensor = layer.kv_cache
        if not cache.is_contiguous():
            raise ValueError(
                "KV eviction needs contiguous head pages, but vLLM pads this model's KV cache "
                "because its layers have page sizes that do not divide one another; serve this "
                "model without --kv-eviction."
            )
        size = spec.block_size * (spec.head_size + spec.head_size_v)
        stored = self.eviction_config.token_format
        if isinstance(spec, EvictableLatentSpec):
            return LayerCache(
                pages=cache.view(-1, size),
                layout=PageLayout.latent(spec.block_size, spec.head_size),
                scale=layer.impl.scale,
                softcap=0.0,
                token_format=stored,
            )
        return LayerCache(
            pages=cache.view(-1, size),
            layout=measure_layout(
                spec.block_size,
                spec.head_size,
                self.model_config.dtype,
                cache.dtype,
                layer.isa,
                layer.impl.kv_cache_dtype,
            ),
            scale=layer.impl.scale,
            softcap=layer.impl.logits_soft_cap,
            key_scale=layer._k_scale_float,
            value_scale=layer._v_scale_float,
            sinks=sinks_of(layer.impl),
            token_format=stored,
            centres=key_centres(self.model_runner.get_model(), layer, stored),
        )

    def _bind(self, worker: WorkerEviction) -> None:
        super()._bind(worker)
        layers = {name: self._layer(name) for name in self._evictable_layers}
        warn_of_lost_keys(self.model_runner.get_model(), layers, worker.cache)
        for name in self._evictable_layers:
            layer = self._layer(name)
            if isinstance(layer.impl, EvictingLatentImpl):
                layer.impl.layer = layer
            cache = worker.cache(name)
            warm_up(cache)
            # Copies are compiled at their first call.
            cache.layout.copy(cache.pages, *[torch.empty(0, dtype=torch.int64)] * 3)


@lru_cache
def measure_layout(
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    isa: str,
    name: str = "auto",
) -> PageLayout:
    """Return the layout of a head page in vLLM's CPU kernel for ``isa``.

    ``name`` is the value of ``--kv-cache-dtype``.
    """

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
        halves = cache.view(1, 1, 2 * block_size, head_size).chunk(2, dim=2)
        slots = torch.arange(block_size)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa, kv_cache_dtype=name)

    return PageLayout.measure(write, block_size, head_size, dtype, cache_dtype)

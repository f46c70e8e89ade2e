"""vLLM's CUDA worker with eviction."""

from typing import Any

from vllm_kvevict.engine.spec import EvictableAttentionSpec
from vllm_kvevict.worker.eviction import LayerCache
from vllm_kvevict.worker.mixin import EvictionWorkerMixin


class EvictingWorker(EvictionWorkerMixin):
    """One CUDA rank. Refused at start-up until an attention backend for CUDA exists."""

    def _register_backend(self) -> None:
        raise ValueError("KV eviction has no attention backend for CUDA yet: use the CPU build.")

    def _layer_cache(self, layer: Any, spec: EvictableAttentionSpec) -> LayerCache:
        raise ValueError("KV eviction has no attention backend for CUDA yet: use the CPU build.")

"""Tells vLLM of the spec of a layer that evicts, and of the manager that serves it."""

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.engine.spec import EvictableAttentionSpec


def register_spec() -> None:
    """Tell vLLM which block manager serves :class:`EvictableAttentionSpec`. Idempotent."""
    # vLLM registers its own specs only into an empty registry: they must come first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        EvictableAttentionSpec,
        EvictableAttentionManager,
        uniform_type_base_spec=FullAttentionSpec,
    )

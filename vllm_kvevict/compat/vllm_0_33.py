"""vLLM 0.33: planning has a module of its own, and the CPU chooses blocks after loading."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

CPU_BLOCK_SIZE = 128
"""Block size that ``CpuPlatform.update_block_size_for_backend`` sets if all layers attend."""


def choose_block_size(vllm_config: "VllmConfig") -> None:
    """As in :mod:`vllm_kvevict.compat.vllm_0_32`."""
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    if current_platform.is_cpu() and not cache.user_specified_block_size:
        cache.block_size = CPU_BLOCK_SIZE


def has_older_ray_executor() -> bool:
    """As in :mod:`vllm_kvevict.compat.vllm_0_32`; this version has no such executor."""
    return False


def kv_cache_configs(
    vllm_config: "VllmConfig", specs: "list[dict[str, KVCacheSpec]]", memory: list[int]
) -> "list[KVCacheConfig]":
    """As in :mod:`vllm_kvevict.compat.vllm_0_32`."""
    from vllm.v1.core import kv_cache_planning as planning

    groups = planning.get_global_kv_cache_groups(vllm_config, specs)
    return planning.get_kv_cache_configs(vllm_config, specs, memory, groups)

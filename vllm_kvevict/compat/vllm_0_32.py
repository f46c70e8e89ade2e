"""vLLM 0.32."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def choose_block_size(vllm_config: "VllmConfig") -> None:
    """Give the cache the block size that a server has when it starts."""


def has_older_ray_executor() -> bool:
    """Whether Ray's executor is the one that calls the model runner without the worker."""
    from vllm import envs

    return not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND


def kv_cache_configs(
    vllm_config: "VllmConfig", specs: "list[dict[str, KVCacheSpec]]", memory: list[int]
) -> "list[KVCacheConfig]":
    """The KV cache of every rank, from the specs of its layers and its bytes.

    Raises:
        ValueError: The memory does not hold one request of the longest length.

    """
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    return get_kv_cache_configs(vllm_config, specs, memory)

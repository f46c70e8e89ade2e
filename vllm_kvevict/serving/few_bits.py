"""Chooses the pages of stores in few bits by the KV cache, and refuses such stores on GPUs where no
kernel reads them, or only slowly."""

from typing import TYPE_CHECKING

from vllm_kvevict.ops.fp8 import CACHE_DTYPES
from vllm_kvevict.serving.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig

FLAG = "--kv-eviction-store-dtype int4 and int8"
AUTO = "set --kv-eviction-store-dtype to auto"


def with_store_dtype(vllm_config: "VllmConfig", config: "EvictionConfig") -> "EvictionConfig":
    """Return the settings with the type of stores in four bits that fits the KV cache.

    A page of an FP8 cache has half the bytes, and holds half as many tokens.
    """
    if config.store_dtype not in FOUR_BITS:
        return config
    fp8 = vllm_config.cache_config.cache_dtype in CACHE_DTYPES
    return config.model_copy(update={"store_dtype": FOUR_BITS[fp8]})


FOUR_BITS = "int4", "int4_fp8"
"""Types by whether the cache is FP8."""


def on_a_gpu() -> bool:
    """Return True if vLLM found another platform than a CPU."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


GPU_STORE_REFUSALS = (
    Refusal(
        f"{FLAG} with an FP8 cache on GPUs",
        "the GPU kernels support stores in few bits only with caches of 16 or 32 bits",
        f"set --kv-cache-dtype to auto or {AUTO}",
        lambda c: c.cache_config.cache_dtype in CACHE_DTYPES,
    ),
    Refusal(
        f"{FLAG} with speculative decoding on GPUs",
        "each step with several query tokens would unpack all stores",
        f"remove --speculative-config or {AUTO}",
        lambda c: c.speculative_config is not None,
    ),
)
"""Configurations that are supported on CPUs and refused on GPUs."""


def refused_on_gpus(vllm_config: "VllmConfig", config: "EvictionConfig") -> list[Refusal]:
    """Return why a GPU would refuse stores in few bits with these settings, whatever the platform
    is here."""
    rows = () if config.token_format.as_cached else GPU_STORE_REFUSALS
    return [row for row in rows if row.applies(vllm_config)]


XFORMERS = Refusal(
    f"{FLAG} with --kv-eviction-attention xformers",
    "its kernel reads pages of plain tokens",
    f"set --kv-eviction-attention to auto or {AUTO}",
    lambda c: True,
)


def check_gpu_stores(config: "EvictionConfig") -> None:
    """Raise ValueError if the chosen attention kernel does not read the stores."""
    if config.attention == "xformers" and not config.token_format.as_cached:
        raise ValueError(XFORMERS.sentence())

"""Refuses stores in few bits on GPUs where no kernel reads them, or only slowly."""

from typing import TYPE_CHECKING

from vllm_kvevict.serving.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig

FLAG = "--kv-eviction-store-dtype int4 and int8"
AUTO = "set --kv-eviction-store-dtype to auto"


def _drafts(vllm_config: "VllmConfig") -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu() and vllm_config.speculative_config is not None


GPU_STORE_REFUSALS = (
    Refusal(
        f"{FLAG} with speculative decoding on GPUs",
        "each step with several query tokens would unpack all stores",
        f"remove --speculative-config or {AUTO}",
        _drafts,
    ),
)

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

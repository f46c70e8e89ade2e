"""Refuses stores in few bits on GPUs where no kernel reads them."""

from typing import TYPE_CHECKING

from vllm_kvevict.serving.refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

AUTO = "set --kv-eviction-store-dtype to auto"


def _on_gpu(vllm_config: "VllmConfig") -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


GPU_STORE_REFUSALS = (
    Refusal(
        "--kv-eviction-store-dtype int4 and int8 on GPUs",
        "no attention kernel for GPUs reads them",
        AUTO,
        _on_gpu,
    ),
)

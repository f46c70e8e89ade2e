"""What xformers' two ops serve, known without importing it: an import would start CUDA.

The paged bias is taken by xformers' split-K op, from compute capability 8.0 on and for single
query tokens. All else runs through its CUTLASS op, over keys gathered from the pages.
"""

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PAGED_FROM = (8, 0)
PAGED_SIZES = (16, 32, 64, 128, 256, 512)
GATHERED = ((5, 0), (9, 0))
DTYPES = ("float16", "bfloat16", "float32")
MEASURE = 8
"""Head sizes are multiples of it in both ops."""


def takes_pages(capability: tuple[int, int], itemsize: int, head_size: int) -> bool:
    """Whether single query tokens run on the pages themselves.

    Args:
        capability: The GPU's compute capability.
        itemsize: Bytes of an element of queries and cache.
        head_size: D.

    """
    return capability >= PAGED_FROM and itemsize == 2 and head_size in PAGED_SIZES


def xformers_problem(vllm_config: "VllmConfig") -> str | None:
    """Why xformers cannot serve this model on this GPU; None where it can."""
    from vllm.platforms import current_platform

    if importlib.util.find_spec("xformers") is None:
        return "xformers is not installed (pip install 'vllm-kvevict[xformers]')"
    if current_platform.is_rocm():
        return "xformers' CUTLASS op is for NVIDIA GPUs"
    capability = current_platform.get_device_capability()
    if capability is None or not GATHERED[0] <= tuple(capability) <= GATHERED[1]:
        return "xformers' CUTLASS op serves compute capabilities 5.0 to 9.0"
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES or (dtype == "bfloat16" and tuple(capability) < (8, 0)):
        return f"xformers has no kernel for {dtype} on this GPU"
    cache = vllm_config.cache_config.cache_dtype
    if cache not in ("auto", dtype):
        return f"xformers cannot read a KV cache of {cache}"
    if model.get_head_size() % MEASURE:
        return f"xformers has no kernel for head size {model.get_head_size()}"
    if getattr(model.hf_text_config, "attn_logit_softcapping", None):
        return "xformers does not cap attention logits, which this model needs"
    return None

"""FP8 KV caches: one scale per layer, elements of 8 bits in float8_e4m3fn."""

import torch

CACHE_DTYPES = ("fp8", "fp8_e4m3")
"""Values of ``--kv-cache-dtype`` that eviction serves beside the model's own type."""

FP8 = torch.float8_e4m3fn


def typed(cache: torch.Tensor) -> torch.Tensor:
    """A cache in the type of its elements, not a copy: vLLM holds FP8 as uint8."""
    return cache.view(FP8) if cache.dtype == torch.uint8 else cache

"""FP8 KV caches, with one scale per layer and float8_e4m3fn elements."""

import torch

CACHE_DTYPES = ("fp8", "fp8_e4m3")
"""Values of ``--kv-cache-dtype`` that eviction supports in addition to the model's dtype."""

FP8 = torch.float8_e4m3fn


def typed(cache: torch.Tensor) -> torch.Tensor:
    """Return a view of a cache in the dtype of its elements: vLLM stores FP8 as uint8."""
    return cache.view(FP8) if cache.dtype == torch.uint8 else cache

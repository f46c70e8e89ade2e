"""What a test needs of the machine beside vLLM."""

import pytest
import torch

FP8_CACHE = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's FP8 KV cache on a CPU needs AVX-512 or AMX, which this one lacks",
)

AMX = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX, whose packing this is"
)

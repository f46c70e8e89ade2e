"""The arithmetic of vLLM's 4-bit caches in the quality benchmark, against vLLM's own kernels."""

import math

import pytest
import torch
from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
from vllm.v1.attention.ops.int4_per_token_head import reshape_and_cache_int4, single_rht
from vllm.v1.attention.ops.triton_turboquant_decode import _tq_full_dequant_kv
from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

from benchmarks.quality.vllm_caches import CACHES, hadamard

TOKENS, HEADS, BLOCK = 23, 2, 16


def tokens(size: int, seed: int) -> torch.Tensor:
    """[TOKENS, HEADS, size] float32: some with an outlier, one all zeros."""
    made = torch.randn(TOKENS, HEADS, size, generator=torch.Generator().manual_seed(seed))
    made[::3, :, 5] *= 30
    made[4] = 0
    return made


@pytest.mark.parametrize("size", [64, 128, 256])
def test_int4_per_token_head_reads_what_vllm_wrote(size: int) -> None:
    given = tokens(size, 1), tokens(size, 2)
    stored = [torch.zeros(2, BLOCK, HEADS, size // 2, dtype=torch.uint8) for _ in given]
    scales = [torch.zeros(2, BLOCK, HEADS) for _ in given]
    reshape_and_cache_int4(
        *given, *stored, torch.arange(TOKENS), k_scale_cache=scales[0], v_scale_cache=scales[1]
    )
    form = CACHES["int4_per_token_head"]
    for x, codes, packed, ours in zip(given, stored, scales, (form.keys, form.values), strict=True):
        levels = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float()
        bits = packed.view(torch.int32)
        scale, zero = (bits & -16).view(torch.float32), (bits & 15).float()
        # The kernel that reads takes the scale with the zero point in its low bits, or without:
        # a difference of one part in a million.
        read = (levels - zero[..., None]) * scale[..., None]
        read = single_rht(read.flatten(0, 1)[:TOKENS], inverse=True) / size
        torch.testing.assert_close(ours(x), read, atol=1e-4, rtol=1e-4)
        assert (read - x).norm() > 0.05 * x.norm(), "nothing was quantised"


@pytest.mark.parametrize("size", [64, 128, 256])
def test_turboquant_reads_what_vllm_wrote(size: int) -> None:
    key, value = tokens(size, 3), tokens(size, 4)
    levels = get_centroids(size, 4)
    middles = (levels[1:] + levels[:-1]) / 2
    key_bytes = size // 2 + 2
    cache = torch.zeros(2, BLOCK, HEADS, key_bytes + size // 2 + 4, dtype=torch.uint8)
    triton_turboquant_store(
        key, value, cache, torch.arange(TOKENS), hadamard(size), middles, 4, key_bytes, 4
    )
    read = [torch.zeros(1, HEADS, 2 * BLOCK, size, dtype=torch.float16) for _ in range(2)]
    _tq_full_dequant_kv[(TOKENS, HEADS)](
        cache, torch.tensor([[0, 1]], dtype=torch.int32), levels, *read,
        *read[0].stride()[:3], *read[1].stride()[:3], *cache.stride()[:3], 2,
        HEAD_DIM=size, BLOCK_SIZE=BLOCK, NUM_KV_HEADS=HEADS, MSE_BYTES=size // 2, KPS=key_bytes,
        VQB=4, VAL_DATA_BYTES=size // 2, MSE_BITS=4, KEY_FP8=0, BLOCK_D=size, NORM_CORRECTION=1,
    )  # fmt: skip
    keys, values = (one[0, :, :TOKENS].transpose(0, 1).float() for one in read)
    form = CACHES["turboquant_4bit_nc"]
    near = dict(atol=2e-2 * math.sqrt(30), rtol=2e-3)
    torch.testing.assert_close(form.keys(key), keys @ hadamard(size), **near)
    torch.testing.assert_close(form.values(value), values, **near)
    assert (keys @ hadamard(size) - key).norm() > 0.05 * key.norm(), "nothing was quantised"

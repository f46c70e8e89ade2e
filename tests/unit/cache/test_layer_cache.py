"""Keys and values of a layer's cache, as vLLM's CPU kernel stored them."""

import pytest
import torch

from tests.hardware import FP8_CACHE
from tests.unit.cache.test_page_layout import write_cache
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.worker.cpu import measure_layout


@FP8_CACHE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_fp8_cache_through_vllms_kernel(dtype):
    blocks, heads, block_size, size = 3, 2, 32, 64
    layout = measure_layout(block_size, size, dtype, torch.uint8, "vec", "fp8")
    # Numbers of FP8 times the scale, so that nothing is lost.
    keys, values = (
        torch.randn(blocks, heads, block_size, size).to(torch.float8_e4m3fn).to(dtype)
        for _ in range(2)
    )
    cache = torch.zeros(blocks, heads, block_size, 2 * size, dtype=torch.uint8)
    write_cache(keys * 0.25, values * 4, cache, "vec", k_scale=0.25, v_scale=4.0,
                kv_cache_dtype="fp8")  # fmt: skip
    pages = cache.view(blocks * heads, -1)
    mine = LayerCache(pages, layout, 1.0, 0.0, key_scale=0.25, value_scale=4.0)
    index = torch.tensor([[5, 0], [3, 3]])
    assert torch.equal(mine.keys(index), keys.flatten(0, 1)[index].float() * 0.25)
    assert torch.equal(mine.values(index), values.flatten(0, 1)[index].float() * 4)
    layout.copy(pages, torch.full((block_size,), 2), torch.arange(block_size), torch.tensor([4]))
    assert torch.equal(mine.keys(torch.tensor([4])), mine.keys(torch.tensor([2])))
    assert mine.stored.data_ptr() == cache.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cache_of_the_models_dtype(dtype):
    layout = measure_layout(32, 64, dtype, dtype, "vec")
    keys, values = torch.randn(2, 1, 2, 32, 64).to(dtype)
    cache = torch.zeros(1, 2, 32, 128, dtype=dtype)
    write_cache(keys, values, cache, "vec")
    mine = LayerCache(cache.view(2, -1), layout, 1.0, 0.0)
    assert not mine.is_fp8 and mine.stored is mine.pages
    assert torch.equal(mine.keys(torch.tensor([1])), keys[:, 1])
    assert torch.equal(mine.values(torch.tensor([0])), values[:, 0])

"""Numbers beside the tokens: they follow the tokens, and vLLM's cache makes room for them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.token_formats import FORMATS
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.config.memory_budget import kv_cache_bytes

BLOCKS, BLOCK_SIZE, SIZE = 6, 4, 3


def layer_cache(memory: torch.Tensor, name: str = "as cached") -> LayerCache:
    offsets = torch.arange(2 * BLOCK_SIZE * SIZE).view(2, BLOCK_SIZE, SIZE)
    pages = memory.view(-1, 2 * BLOCK_SIZE * SIZE)
    layout = PageLayout(offsets[0], offsets[1])
    return LayerCache(pages, layout, 1.0, 0.0, token_format=FORMATS[name])


def cache_memory(heads: int) -> torch.Tensor:
    return torch.zeros(BLOCKS * heads * 2 * BLOCK_SIZE * SIZE)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_follow_the_tokens(name):
    heads, channels = 2, 3
    cache = layer_cache(cache_memory(heads), name)
    page_tokens = {"as cached": BLOCK_SIZE, "bytes": 4 * BLOCK_SIZE}[name]
    values = TokenStats({"a": cache}, {"a": heads}, channels)
    assert values.layer("a").shape == (BLOCKS * heads, page_tokens, channels)
    assert values.num_bytes == BLOCKS * heads * page_tokens * channels * 4
    values.layer("a").copy_(torch.randn(BLOCKS * heads, page_tokens, channels))
    before = values.layer("a").clone()

    # Slot 2 of block 1 and slot 3 of block 4 hold new tokens; head h of block b is page 2 b + h.
    values.reset("a", torch.tensor([1 * BLOCK_SIZE + 2, 4 * BLOCK_SIZE + 3]))
    expected = before.clone()
    for page, slot in [(2, 2), (3, 2), (8, 3), (9, 3)]:
        expected[page, slot] = 0
    assert torch.equal(values.layer("a"), expected)

    size = page_tokens // BLOCK_SIZE
    source_page = torch.tensor([0, 0, 7, 2, 1, 1, 1, 5] * size)
    source_slot = torch.tensor([1, 3, 0, 2, 0, 1, 2, 3] * size)
    values.move("a", source_page, source_slot, torch.tensor([10, 6]))
    for index, (page, slot) in enumerate(zip(source_page, source_slot, strict=True)):
        target = (10, 6)[index // page_tokens]
        assert torch.equal(values.layer("a")[target, index % page_tokens], expected[page, slot])
    others = [page for page in range(BLOCKS * heads) if page not in (6, 10)]
    assert torch.equal(values.layer("a")[others], expected[others])


def test_layers_share_numbers_where_they_share_memory():
    """As vLLM's groups do; also where one of them has more heads of fewer tokens."""
    one, other = cache_memory(2), cache_memory(2)
    caches = {"a": layer_cache(one), "b": layer_cache(other), "c": layer_cache(one)}
    values = TokenStats(caches, dict(a=2, b=2, c=2), 1)
    assert values.num_bytes == 2 * BLOCKS * 2 * BLOCK_SIZE * 4
    values.layer("a").fill_(1.0)
    assert bool((values.layer("c") == 1).all())
    assert not bool(values.layer("b").any())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("channels", [0, 1, 4])
@given(
    available=st.integers(0, 2**40),
    shapes=st.lists(
        st.tuples(st.sampled_from([1, 2, 8]), st.sampled_from([32, 64, 128])), min_size=1
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_cache_and_its_numbers_fit_together(name, channels, available, shapes, dtype):
    specs = [
        FullAttentionSpec(block_size=32, num_kv_heads=heads, head_size=size, dtype=dtype)
        for heads, size in shapes
    ]
    left = kv_cache_bytes(available, specs, channels, FORMATS[name])
    page = sum(spec.page_size_bytes for spec in specs)
    page_tokens = {"as cached": 32, "bytes": 128}[name]
    beside = sum(spec.num_kv_heads * page_tokens * channels * 4 for spec in specs)
    num_blocks = left // page
    assert num_blocks * (page + beside) <= available
    if not channels:
        assert left == available
    if len({size for _, size in shapes}) == 1:
        assert (num_blocks + 1) * (page + beside) > available - (page + beside), "wasteful"

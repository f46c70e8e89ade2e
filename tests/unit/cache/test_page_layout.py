"""Page layouts: vLLM's own CPU kernels, and packings no kernel here uses."""

import pytest
import torch

from tests.hardware import AMX
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.ops.cpu import move
from vllm_kvevict.worker.cpu import measure_layout


def write_cache(keys, values, cache, isa, **quantisation):
    """Through vLLM's kernel: keys and values [blocks, H, block_size, D] to the cache."""
    from vllm import _custom_ops as ops

    blocks, heads, block_size, size = keys.shape
    halves = cache.view(blocks, heads, 2 * block_size, size).chunk(2, dim=2)
    tokens = [x.transpose(1, 2).reshape(-1, heads, size).contiguous() for x in (keys, values)]
    slots = torch.arange(blocks * block_size)
    ops.cpu_attn_reshape_and_cache(*tokens, *halves, slots, isa, **quantisation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", ["vec", "vec16", pytest.param("amx", marks=AMX)])
@pytest.mark.parametrize(("block_size", "size"), [(32, 32), (64, 128), (128, 64)])
def test_keys_and_copies_through_vllms_kernel(dtype, block_size, size, isa):
    if isa == "amx" and dtype == torch.float32:
        pytest.skip("this kernel has no float32")
    blocks, heads = 4, 2
    layout = measure_layout(block_size, size, dtype, dtype, isa)
    assert all(view.even for view in layout._views), "no copy goes element by element"
    keys = torch.randn(blocks, heads, block_size, size, dtype=dtype)
    values = torch.randn(blocks, heads, block_size, size, dtype=dtype)
    cache = torch.zeros(blocks, heads, block_size, 2 * size, dtype=dtype)
    write_cache(keys, values, cache, isa)
    pages = cache.view(blocks * heads, -1)
    index = torch.tensor([[5, 0], [3, 3]])
    for read, x in [(layout.read_keys, keys), (layout.read_values, values)]:
        assert torch.equal(read(pages, index), x.view(blocks * heads, block_size, size)[index])

    source_page = torch.randint(0, 4, (2 * block_size,))
    source_slot = torch.randint(0, block_size, (2 * block_size,))
    layout.copy(pages, source_page, source_slot, torch.tensor([6, 4]))
    expected = torch.zeros_like(cache)
    for x in (keys, values):
        moved = x.view(blocks * heads, block_size, size)[source_page, source_slot]
        x.view(blocks * heads, block_size, size)[[6, 4]] = moved.view(2, block_size, size)
    write_cache(keys, values, expected, isa)
    assert torch.equal(cache, expected)


def numbered(shape, strides, first=0):
    """Offsets [tokens, dims] of tokens and dimensions that each lie in groups of their own step."""
    grid = torch.zeros(shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        grid += (stride * torch.arange(size)).view(*(1,) * dim, -1, *(1,) * (3 - dim))
    return first + grid.flatten(0, 1).flatten(1)


# Of [tokens, tokens in a group, dims, dims in a group], eight tokens of six dimensions.
PACKINGS = {
    "token by token": numbered((1, 8, 1, 6), (0, 6, 0, 1)),
    "token by token, with gaps": numbered((1, 8, 1, 6), (0, 7, 0, 1)),
    "dimension by dimension": numbered((1, 8, 1, 6), (0, 1, 0, 8)),
    "pairs of dimensions": numbered((1, 8, 3, 2), (0, 2, 16, 1)),
    "pairs of dimensions, tiles of tokens": numbered((2, 4, 3, 2), (24, 2, 8, 1)),
    "pairs of tokens": numbered((4, 2, 1, 6), (12, 1, 0, 2)),
    "with gaps everywhere": numbered((1, 8, 1, 6), (0, 15, 0, 2)),
    "in no order": torch.randperm(48, generator=torch.Generator().manual_seed(0)).view(8, 6),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("values", PACKINGS)
@pytest.mark.parametrize("keys", PACKINGS)
def test_tokens_are_copied_as_if_all_were_read_first(keys, values, dtype, threads, monkeypatch):
    """Pages lie in a larger tensor; some targets are sources, in any order."""
    monkeypatch.setattr(move, "ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    layout = PageLayout(3 + PACKINGS[keys], 130 + PACKINGS[values])
    pages = torch.randint(1, 100, (14, 260)).to(dtype)[2:]
    target = torch.randperm(12)[:5]
    page, slot = torch.randint(0, 12, (40,)), torch.randint(0, 8, (40,))
    page[:16] = page[:16].sort().values
    expected = pages.tolist()
    for number in range(40):
        for offsets in (layout.keys, layout.values):
            for dim in range(6):
                value = pages[page[number], offsets[slot[number], dim]]
                into = offsets[number % 8, dim]
                expected[target[number // 8]][into] = value.item()
    layout.copy(pages, page, slot, target)
    assert pages.tolist() == expected


def scatter(order):
    """A writer that stores element i of [keys, values] at ``order[i]``."""

    def write(keys, values, cache):
        cache.view(-1)[order] = torch.cat([keys.flatten(), values.flatten()])

    return write


def test_a_packing_without_even_strides_is_followed():
    block_size, size = 8, 4
    order = torch.randperm(2 * block_size * size)
    layout = PageLayout.measure(scatter(order), block_size, size, torch.bfloat16, torch.bfloat16)
    assert torch.equal(layout.keys.flatten(), order[: block_size * size])
    keys, values = torch.randn(3, block_size, size), torch.randn(3, block_size, size)
    pages = torch.zeros(3, 2 * block_size * size)
    for page in range(3):
        scatter(order)(keys[page], values[page], pages[page])
    assert torch.equal(layout.read_keys(pages, torch.tensor([2, 1])), keys[[2, 1]])
    layout.copy(pages, torch.full((8,), 1), torch.arange(8).flip(0), torch.tensor([0]))
    expected = torch.zeros(2 * block_size * size)
    scatter(order)(keys[1].flip(0), values[1].flip(0), expected)
    assert torch.equal(pages[0], expected)


def test_a_lossy_packing_is_refused():
    def write(keys, values, cache):
        cache.view(-1)[: keys.numel()] = keys.flatten()

    with pytest.raises(ValueError, match="not a permutation"):
        PageLayout.measure(write, 8, 4, torch.float32, torch.float32)


def test_entries_of_a_latent_cache_move_whole():
    layout = PageLayout.latent(4, 6)
    pages = torch.arange(3 * 24.0).view(3, 24)
    entries = pages.clone().view(3, 4, 6)
    assert torch.equal(layout.read_keys(pages, torch.tensor([2, 0])), entries[[2, 0]])
    # Page 1 takes tokens of itself and of others.
    layout.copy(pages, torch.tensor([0, 1, 1, 2]), torch.tensor([3, 0, 2, 1]), torch.tensor([1]))
    expected = torch.stack([entries[0, 3], entries[1, 0], entries[1, 2], entries[2, 1]])
    assert torch.equal(pages.view(3, 4, 6)[1], expected)
    assert torch.equal(pages.view(3, 4, 6)[[0, 2]], entries[[0, 2]])

"""Page layouts: vLLM's own CPU kernels, and packings no kernel here uses."""

import pytest
import torch

from tests.hardware import AMX
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.worker.cpu import measure_layout

COPIES = pytest.mark.parametrize("copy", [PageLayout.copy, PageLayout.copy_by_torch])


def write_cache(keys, values, cache, isa, **quantisation):
    """Through vLLM's kernel: keys and values [blocks, H, block_size, D] to the cache."""
    from vllm import _custom_ops as ops

    blocks, heads, block_size, size = keys.shape
    halves = cache.view(blocks, heads, 2 * block_size, size).chunk(2, dim=2)
    tokens = [x.transpose(1, 2).reshape(-1, heads, size).contiguous() for x in (keys, values)]
    slots = torch.arange(blocks * block_size)
    ops.cpu_attn_reshape_and_cache(*tokens, *halves, slots, isa, **quantisation)


@COPIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", ["vec", "vec16", pytest.param("amx", marks=AMX)])
@pytest.mark.parametrize(("block_size", "size"), [(32, 32), (64, 128), (128, 64)])
def test_keys_and_copies_through_vllms_kernel(copy, dtype, block_size, size, isa):
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
    copy(layout, pages, source_page, source_slot, torch.tensor([6, 4]))
    expected = torch.zeros_like(cache)
    for x in (keys, values):
        moved = x.view(blocks * heads, block_size, size)[source_page, source_slot]
        x.view(blocks * heads, block_size, size)[[6, 4]] = moved.view(2, block_size, size)
    write_cache(keys, values, expected, isa)
    assert torch.equal(cache, expected)


def scatter(order):
    """A writer that stores element i of [keys, values] at ``order[i]``."""

    def write(keys, values, cache):
        cache.view(-1)[order] = torch.cat([keys.flatten(), values.flatten()])

    return write


@COPIES
def test_a_packing_without_even_strides_is_followed(copy):
    block_size, size = 8, 4
    order = torch.randperm(2 * block_size * size)
    layout = PageLayout.measure(scatter(order), block_size, size, torch.bfloat16, torch.bfloat16)
    assert torch.equal(layout.keys.flatten(), order[: block_size * size])
    keys, values = torch.randn(3, block_size, size), torch.randn(3, block_size, size)
    pages = torch.zeros(3, 2 * block_size * size)
    for page in range(3):
        scatter(order)(keys[page], values[page], pages[page])
    assert torch.equal(layout.read_keys(pages, torch.tensor([2, 1])), keys[[2, 1]])
    copy(layout, pages, torch.full((8,), 1), torch.arange(8).flip(0), torch.tensor([0]))
    expected = torch.zeros(2 * block_size * size)
    scatter(order)(keys[1].flip(0), values[1].flip(0), expected)
    assert torch.equal(pages[0], expected)


def test_a_lossy_packing_is_refused():
    def write(keys, values, cache):
        cache.view(-1)[: keys.numel()] = keys.flatten()

    with pytest.raises(ValueError, match="not a permutation"):
        PageLayout.measure(write, 8, 4, torch.float32, torch.float32)


@COPIES
def test_entries_of_a_latent_cache_move_whole(copy):
    layout = PageLayout.latent(4, 6)
    pages = torch.arange(3 * 24.0).view(3, 24)
    entries = pages.clone().view(3, 4, 6)
    assert torch.equal(layout.read_keys(pages, torch.tensor([2, 0])), entries[[2, 0]])
    # Page 1 takes tokens of itself and of others.
    copy(layout, pages, torch.tensor([0, 1, 1, 2]), torch.tensor([3, 0, 2, 1]), torch.tensor([1]))
    expected = torch.stack([entries[0, 3], entries[1, 0], entries[1, 2], entries[2, 1]])
    assert torch.equal(pages.view(3, 4, 6)[1], expected)
    assert torch.equal(pages.view(3, 4, 6)[[0, 2]], entries[[0, 2]])

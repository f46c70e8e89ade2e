"""Keys and values of a layer's cache, as vLLM's CPU kernel stored them."""

import pytest
import torch

from tests.hardware import FP8_CACHE
from tests.oracles.packed import given_back
from tests.token_formats import FORMATS
from tests.unit.cache.test_page_layout import write_cache
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.ops.token_format import INT4, INT8
from vllm_kvevict.worker.cpu import measure_layout
from vllm_kvevict.worker.gpu import interleaved


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


def some_layout(block_size: int, size: int, latent: bool) -> PageLayout:
    if latent:
        return PageLayout.latent(block_size, size)
    offsets = torch.randperm(2 * block_size * size).view(2, block_size, size)
    return PageLayout(offsets[0], offsets[1])


@pytest.mark.parametrize(
    ("name", "latent"), [*((name, False) for name in FORMATS), ("as cached", True)]
)
def test_survivors_are_stored_and_stored_again(name, latent):
    """Evictions from blocks, and from a store and blocks, against lists of tokens."""
    torch.manual_seed(3)
    block_size, size, num_pages, token_format = 4, 6, 40, FORMATS[name]
    layout = some_layout(block_size, size, latent)
    elements = layout.keys.numel() + layout.values.numel()
    pages = torch.randint(256, (num_pages, elements)).float()
    cache = LayerCache(
        pages, layout, 1.0, 0.0, key_scale=1.0, value_scale=1.0, token_format=token_format
    )
    page_tokens = cache.page_tokens
    every = torch.arange(num_pages)
    keys = cache.keys(every).clone()
    values = None if latent else cache.values(every).clone()

    # Tokens of blocks 20 to 39 fill pages 3 and 1.
    page, slot = torch.randint(20, 40, (2 * page_tokens,)), torch.randint(4, (2 * page_tokens,))
    cache.move(page, slot, torch.tensor([3, 1]))
    first = keys[page, slot]
    assert torch.equal(cache.stored_tokens(torch.tensor([3, 1]))[0].flatten(0, 1), first)
    if values is not None:
        stored = cache.stored_tokens(torch.tensor([[3], [1]]))[1]
        assert torch.equal(stored.flatten(0, 2), values[page, slot])

    # Half of the next store's tokens are of the first one, whose pages it fills.
    half = page_tokens // 2
    place = torch.randperm(2 * page_tokens)[:half]
    old = torch.tensor([3, 1])[place // page_tokens], place % page_tokens
    new = torch.randint(20, 40, (half,)), torch.randint(4, (half,))
    from_store = torch.arange(2 * half) < half
    cache.move(
        torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]]), torch.tensor([3]), from_store
    )
    expected = torch.cat([first[place], keys[new]])
    assert torch.equal(cache.stored_tokens(torch.tensor([3]))[0][0], expected)
    untouched = [number for number in range(num_pages) if number not in (1, 3)]
    assert torch.equal(cache.keys(torch.tensor(untouched)), keys[untouched])


@pytest.mark.parametrize("name", FORMATS)
def test_a_float_cache_has_no_scales(name):
    layout, token_format = some_layout(2, 3, False), FORMATS[name]
    cache = LayerCache(
        torch.randint(256, (8, 12)).float(), layout, 1.0, 0.0,
        key_scale=0.5, value_scale=2.0, token_format=token_format,
    )  # fmt: skip
    page, slot = torch.arange(cache.page_tokens) % 4 + 2, torch.arange(cache.page_tokens) % 2
    raw = layout.read_keys(cache.pages, page)[torch.arange(len(page)), slot].clone()
    cache.move(page, slot, torch.tensor([0]))
    assert torch.equal(cache.stored_tokens(torch.tensor([0]))[0][0], raw)


def test_a_format_whose_tokens_do_not_fit_is_refused():
    class Large(type(FORMATS["bytes"])):
        def page_tokens(self, block_size: int) -> int:
            return 5 * block_size

    assert FORMATS["bytes"].page_bytes(16, 128, 4) == 16 * 128 * 4
    with pytest.raises(ValueError, match="do not hold 80 tokens of bytes"):
        Large().page_bytes(16, 128, 4)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["compiled", "as on a GPU"])
def test_a_constant_part_of_keys_costs_no_accuracy(elsewhere):
    """The keys of two heads, with a large constant each, against numpy without the constant."""
    torch.manual_seed(5)
    size, block_size, heads, pages = 64, 16, 2, 80
    layout = interleaved(block_size, size)
    centres = 100 * torch.randn(heads, size)
    tokens = torch.randn(pages, block_size, 2, size)
    exact = tokens[:, :, 0].clone()
    tokens[:, :, 0] += centres.repeat(pages // heads, 1)[:, None]
    cache = LayerCache(tokens.flatten(1), layout, 1.0, 0.0, token_format=INT4, centres=centres)
    count = cache.page_tokens
    # Survivors of head 1, which fill a page in a place of head 0.
    page, slot = torch.arange(count) // block_size * 2 + 31, torch.arange(count) % block_size
    target = torch.tensor([4])
    expected = given_back(exact[page, slot], 5) + centres[1]
    if elsewhere:
        found = [plane.new_empty(count, plane.shape[-1]) for plane in cache.planes]
        cache._read_alike(page, slot, torch.zeros(count, dtype=torch.bool), found)
        for plane, part in zip(cache.planes, found, strict=True):
            plane[target] = part[None]
    else:
        cache.move(page, slot, target)
    keys = cache.key_sequences(target[None], 1, slice(1, 2))[0]
    assert torch.isclose(keys, expected, atol=1e-3).all(-1).float().mean() > 0.9
    assert float((keys - expected).square().mean()) < 1e-3
    order = torch.arange(count)
    alone, _ = cache.tokens(target.expand(count), order, order >= 0, torch.tensor(1))
    assert torch.equal(alone, keys)


@pytest.mark.parametrize("token_format", [INT4, INT8], ids=lambda one: f"{one.key_bits} bits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_bits_keep_what_was_stored(token_format, dtype):
    """Stored tokens are near, a copy of them is the same bytes, and NaN stays in its token."""
    torch.manual_seed(1)
    bits, size, block_size, pages = token_format.value_bits, 64, 16, 80
    layout = some_layout(block_size, size, False)
    elements = torch.randn(pages, 2 * block_size * size).to(dtype)
    elements.view(-1)[layout.keys[3, 5] + 30 * elements.shape[1]] = float("nan")
    cache = LayerCache(elements, layout, 1.0, 0.0, token_format=token_format)
    count = cache.page_tokens
    assert token_format.page_bytes(block_size, 2 * size, dtype.itemsize) >= count * (
        sum(token_format.planes(size))
    )
    page, slot = torch.arange(count) // block_size + 30, torch.arange(count) % block_size
    expected = cache.keys(page)[torch.arange(count), slot].float()
    expected_values = cache.values(page)[torch.arange(count), slot].float()
    cache.move(page, slot, torch.tensor([3]))
    keys, values = cache.stored_tokens(torch.tensor([3]))
    bad = expected.isnan().any(-1)
    assert int(bad.sum()) == 1 and torch.equal(keys[0].isnan().all(-1), bad)
    assert not values.isnan().any()
    # Of evenly spaced levels over four standard deviations to either side.
    step = 8 / 2**bits
    assert torch.equal(keys[0].isnan().any(-1), bad)
    for found, wanted in ((keys[0][~bad], expected[~bad]), (values[0], expected_values)):
        assert float((found - wanted).square().mean()) < step**2 / 12
    first = [plane[3].clone() for plane in cache.planes]
    cache.move(
        torch.full((count,), 3), torch.arange(count), torch.tensor([7]), torch.ones(count).bool()
    )
    for plane, before in zip(cache.planes, first, strict=True):
        assert torch.equal(plane[7], before)

"""Compiled readers and copiers of pages against numbers moved one by one."""

import pytest
import torch

from vllm_kvevict.ops.cpu import pages as compiled
from vllm_kvevict.ops.places import Places

BLOCK = 4

ORDERS = {
    "any": lambda size: torch.randperm(BLOCK * size).view(BLOCK, size),
    "token by token": lambda size: torch.arange(BLOCK * size).view(BLOCK, size),
    "token by token, apart": lambda size: 8 * torch.arange(BLOCK)[:, None] + torch.arange(size),
    "dimension by dimension": lambda size: torch.arange(BLOCK * size).view(size, BLOCK).T,
    "both apart": lambda size: 24 * torch.arange(BLOCK)[:, None] + 3 * torch.arange(size),
}


@pytest.fixture(params=ORDERS)
def order(request):
    return ORDERS[request.param]


# Eight bytes at a time only where pages, tokens and their first element are whole words.
@pytest.mark.parametrize(("first", "width"), [(0, 128), (8, 128), (3, 128), (8, 129)])
@pytest.mark.parametrize("size", [8, 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_tokens_are_copied_as_if_all_were_read_first(order, first, width, size, dtype):
    torch.manual_seed(0)
    offsets = first + order(size)
    pages = torch.randint(1, 100, (12, width)).to(dtype)
    # Some targets are sources.
    target = torch.randperm(12)[:5]
    page, slot = torch.randint(0, 12, (5 * BLOCK,)), torch.randint(0, BLOCK, (5 * BLOCK,))
    expected = pages.tolist()
    for number in range(5 * BLOCK):
        for element in range(size):
            value = pages[page[number], offsets[slot[number], element]]
            into = offsets[number % BLOCK, element]
            expected[target[number // BLOCK]][into] = value.item()
    assert pages.tolist() != expected
    compiled.copy_tokens(pages, page, slot, target, Places.of(offsets))
    assert pages.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_read_as_they_lie(order, dtype):
    """More pages than are read at a time, and not a multiple of them."""
    torch.manual_seed(0)
    offsets = 2 + order(6)
    pages = torch.randn(40, 128).to(dtype)
    index = torch.randperm(40)[:38].view(2, 19)
    expected = pages[index][..., offsets].flatten(1, 2).float()
    places = Places.of(offsets)
    assert torch.equal(compiled.read_floats(pages, index, places), expected)
    found = compiled.norms(pages, index, places)
    torch.testing.assert_close(found, expected.square().sum(-1).sqrt())

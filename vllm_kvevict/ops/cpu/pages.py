"""Reading and copying tokens of head pages, compiled."""

from typing import Any

import numpy as np
import torch

from vllm_kvevict.ops.cpu.compiled import exact, fast
from vllm_kvevict.ops.places import Places

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""A type that NumPy knows, by bytes of an element."""


def arguments(pages: torch.Tensor, index: torch.Tensor, places: Places) -> tuple[Any, ...]:
    """What compiled readers of pages take: bits, index, places, and the bits to shift by."""
    shift = 16 if pages.dtype == torch.bfloat16 else 0
    bits = pages.view(BITS[pages.itemsize]).numpy()
    return bits, index.contiguous().numpy(), places.offsets, *places.steps, shift


def read_floats(pages: torch.Tensor, index: torch.Tensor, places: Places) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.host.read_floats`."""
    block_size, size = places.offsets.shape
    shape = len(index), size, index.shape[1] * block_size
    found = torch.empty(shape, dtype=torch.int32, device="cpu")
    _read(*arguments(pages, index, places), found.numpy())
    return found.view(torch.float32).mT


def norms(pages: torch.Tensor, index: torch.Tensor, places: Places) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.host.norms`."""
    found = torch.empty(len(index), index.shape[1] * len(places.offsets), device="cpu")
    _norms(*arguments(pages, index, places), found.numpy())
    return found


def copy_tokens(
    pages: torch.Tensor,
    source_page: torch.Tensor,
    source_slot: torch.Tensor,
    target_page: torch.Tensor,
    places: Places,
) -> None:
    """As :func:`vllm_kvevict.ops.host.copy_tokens`."""
    bits = pages.view(BITS[pages.itemsize]).numpy()
    index = [one.contiguous().numpy() for one in (source_page, source_slot, target_page)]
    _copy(bits, *index, places.offsets, *places.steps)


@exact
def unpack(
    page: np.ndarray,
    offsets: np.ndarray,
    first: int,
    by_token: int,
    by_element: int,
    shift: int,
    start: int,
    found: np.ndarray,
) -> None:
    """Write the bits of a page's tokens, as those of float32, from column ``start`` on."""
    block_size, size = offsets.shape
    bits = np.int32(shift)
    for element in range(size):
        row = found[element, start : start + block_size]
        if by_token == 1:
            place = first + element * by_element
            mine = page[place : place + block_size]
            for token in range(block_size):
                row[token] = np.int32(mine[token]) << bits
        else:
            for token in range(block_size):
                row[token] = np.int32(page[offsets[token, element]]) << bits


@exact
def _read(
    pages: np.ndarray,
    index: np.ndarray,
    offsets: np.ndarray,
    first: int,
    by_token: int,
    by_element: int,
    shift: int,
    found: np.ndarray,
) -> None:
    heads, count = index.shape
    for head in range(heads):
        for number in range(count):
            page, start = pages[index[head, number]], number * len(offsets)
            unpack(page, offsets, first, by_token, by_element, shift, start, found[head])


@fast
def _norms(
    pages: np.ndarray,
    index: np.ndarray,
    offsets: np.ndarray,
    first: int,
    by_token: int,
    by_element: int,
    shift: int,
    found: np.ndarray,
) -> None:
    heads, count = index.shape
    block_size, size = offsets.shape
    bits = np.int32(shift)
    wide = np.empty(size, np.int32)
    values = wide.view(np.float32)
    for head in range(heads):
        for number in range(count):
            page = pages[index[head, number]]
            for token in range(block_size):
                if by_element == 1:
                    place = first + token * by_token
                    mine = page[place : place + size]
                    for element in range(size):
                        wide[element] = np.int32(mine[element]) << bits
                else:
                    for element in range(size):
                        wide[element] = np.int32(page[offsets[token, element]]) << bits
                total = np.float32(0)
                for element in range(size):
                    total += values[element] * values[element]
                found[head, number * block_size + token] = np.sqrt(total)


@exact
def _copy(
    pages: np.ndarray,
    source_page: np.ndarray,
    source_slot: np.ndarray,
    target_page: np.ndarray,
    offsets: np.ndarray,
    first: int,
    by_token: int,
    by_element: int,
) -> None:
    block_size, size = offsets.shape
    targets = len(target_page)
    if by_token == 1:
        turned = np.empty((targets, size, block_size), pages.dtype)
        for target in range(targets):
            for token in range(block_size):
                number = target * block_size + token
                page = pages[source_page[number]]
                place = first + source_slot[number]
                for element in range(size):
                    turned[target, element, token] = page[place + element * by_element]
        for target in range(targets):
            page = pages[target_page[target]]
            for element in range(size):
                place = first + element * by_element
                page[place : place + block_size] = turned[target, element]
        return
    held = np.empty((targets, block_size, size), pages.dtype)
    for target in range(targets):
        for token in range(block_size):
            number = target * block_size + token
            page, slot = pages[source_page[number]], source_slot[number]
            mine = held[target, token]
            if by_element == 1:
                place = first + slot * by_token
                mine[:] = page[place : place + size]
            else:
                for element in range(size):
                    mine[element] = page[offsets[slot, element]]
    for target in range(targets):
        page = pages[target_page[target]]
        for token in range(block_size):
            if by_element == 1:
                place = first + token * by_token
                page[place : place + size] = held[target, token]
            else:
                for element in range(size):
                    page[offsets[token, element]] = held[target, token, element]

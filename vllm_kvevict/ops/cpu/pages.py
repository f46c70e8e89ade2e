"""Reading and copying tokens of head pages, compiled."""

from typing import Any

import numba
import numpy as np
import torch

from vllm_kvevict.ops.cpu.compiled import exact, fast, shared
from vllm_kvevict.ops.cpu.team import share
from vllm_kvevict.ops.places import Places

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""A type that NumPy knows, by bytes of an element."""

PAGES = 32
"""Pages at a time: what is made of them stays in the first caches."""


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
    pieces = len(index) * -(-index.shape[1] // PAGES)
    share(_read_all, _read, pieces, *arguments(pages, index, places), found.numpy())
    return found.view(torch.float32).mT


def norms(pages: torch.Tensor, index: torch.Tensor, places: Places) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.host.norms`."""
    found = torch.empty(len(index), index.shape[1] * len(places.offsets), device="cpu")
    share(_all_norms, _norms, index.numel(), *arguments(pages, index, places), found.numpy())
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
    *source, target = (one.contiguous().numpy() for one in (source_page, source_slot, target_page))
    first, by_token, by_element = places.steps
    block_size, size = places.offsets.shape
    # All are read before one is written: a target may be a source.
    if first >= 0 and by_token == 1:
        columns = np.empty((len(target), size, block_size), bits.dtype)
        into, count = (first, by_element, columns), len(columns)
        share(_read_all_columns, _read_columns, count, bits, *source, *into)
        share(_write_all_columns, _write_columns, count, bits, target, *into)
    elif first >= 0 and by_element == 1:
        # Eight bytes at a time, where all begins and ends at such.
        words = 8 // pages.itemsize
        if any(step % words for step in (size, first, by_token, bits.shape[1])):
            words = 1
        else:
            bits = bits.view(np.int64)
        rows = np.empty((len(source_page), size // words), bits.dtype)
        into, count = (first // words, by_token // words, rows), len(rows)
        share(_read_all_rows, _read_rows, count, bits, *source, *into)
        share(_write_all_rows, _write_rows, count, bits, target, *into)
    else:
        _copy_any(bits, *source, target, places.offsets)


@exact
def fetch(pages: np.ndarray, index: np.ndarray, first: int, count: int, found: np.ndarray) -> None:
    """Read of each line of the cache a number, in order, so that others need not wait for memory.

    What is read dimension by dimension jumps from page to page: scores took a third longer.
    """
    seen, step = 0, 64 // pages.itemsize
    for number in index:
        page = pages[number]
        for place in range(first, first + count, step):
            seen += page[place]
    found[0] = seen


@exact
def unpack(
    pages: np.ndarray,
    index: np.ndarray,
    offsets: np.ndarray,
    first: int,
    by_token: int,
    by_element: int,
    shift: int,
    element: int,
    row: np.ndarray,
) -> None:
    """Write the bits of one element of the tokens of pages ``index``, as those of float32."""
    block_size, bits = len(offsets), np.int32(shift)
    for number in range(len(index)):
        page = pages[index[number]]
        mine = row[number * block_size : (number + 1) * block_size]
        if by_token == 1:
            place = first + element * by_element
            read = page[place : place + block_size]
            for token in range(block_size):
                mine[token] = np.int32(read[token]) << bits
        else:
            for token in range(block_size):
                mine[token] = np.int32(page[offsets[token, element]]) << bits


@exact
def _read(
    first_piece: int,
    end_piece: int,
    pages: np.ndarray,
    index: np.ndarray,
    offsets: np.ndarray,
    first: int,
    by_token: int,
    by_element: int,
    shift: int,
    found: np.ndarray,
) -> None:
    """Floats [H, D, N], of which a piece is some pages of a head."""
    count = index.shape[1]
    block_size, size = offsets.shape
    steps = first, by_token, by_element
    parts = (count + PAGES - 1) // PAGES
    for piece in range(first_piece, end_piece):
        head, number = piece // parts, piece % parts * PAGES
        some = index[head, number : min(count, number + PAGES)]
        start = number * block_size
        for element in range(size):
            row = found[head, element, start : start + len(some) * block_size]
            unpack(pages, some, offsets, *steps, shift, element, row)


@fast
def _norms(
    first_page: int,
    end_page: int,
    pages: np.ndarray,
    index: np.ndarray,
    offsets: np.ndarray,
    first: int,
    by_token: int,
    by_element: int,
    shift: int,
    found: np.ndarray,
) -> None:
    count = index.shape[1]
    block_size, size = offsets.shape
    bits = np.int32(shift)
    wide = np.empty(size, np.int32)
    values = wide.view(np.float32)
    for piece in range(first_page, end_page):
        head, number = piece // count, piece % count
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
def _read_columns(
    first_target: int,
    end_target: int,
    pages: np.ndarray,
    source_page: np.ndarray,
    source_slot: np.ndarray,
    first: int,
    by_element: int,
    held: np.ndarray,
) -> None:
    """Read tokens that lie beside one another, element by element: [targets, D, block_size]."""
    size, block_size = held.shape[1:]
    width, flat = pages.shape[1], pages.reshape(-1)
    # Numba asks of every signed place whether it counts from the end: a quarter of the time.
    begin = np.empty(block_size, np.uint64)
    for target in range(first_target, end_target):
        for token in range(block_size):
            number = target * block_size + token
            begin[token] = source_page[number] * width + first + source_slot[number]
        for element in range(size):
            row, place = held[target, element], np.uint64(element * by_element)
            for token in range(block_size):
                row[token] = flat[begin[token] + place]


@exact
def _write_columns(
    first_target: int,
    end_target: int,
    pages: np.ndarray,
    target_page: np.ndarray,
    first: int,
    by_element: int,
    held: np.ndarray,
) -> None:
    size, block_size = held.shape[1:]
    for target in range(first_target, end_target):
        page = pages[target_page[target]]
        for element in range(size):
            place = first + element * by_element
            page[place : place + block_size] = held[target, element]


@exact
def _read_rows(
    first_token: int,
    end_token: int,
    pages: np.ndarray,
    source_page: np.ndarray,
    source_slot: np.ndarray,
    first: int,
    by_token: int,
    held: np.ndarray,
) -> None:
    """Read tokens whose elements lie beside one another: [tokens, D]."""
    size, width, flat = held.shape[1], pages.shape[1], pages.reshape(-1)
    for number in range(first_token, end_token):
        row = held[number]
        place = source_page[number] * width + first + source_slot[number] * by_token
        for element in range(size):
            row[element] = flat[place + element]


@exact
def _write_rows(
    first_token: int,
    end_token: int,
    pages: np.ndarray,
    target_page: np.ndarray,
    first: int,
    by_token: int,
    held: np.ndarray,
) -> None:
    count, size = held.shape
    width, flat = pages.shape[1], pages.reshape(-1)
    block_size = count // len(target_page)
    for number in range(first_token, end_token):
        row = held[number]
        place = target_page[number // block_size] * width + first + number % block_size * by_token
        for element in range(size):
            flat[place + element] = row[element]


@shared
def _read_all(parts: int, pieces: int, *args: Any) -> None:
    for part in numba.prange(parts):
        _read(part * pieces // parts, (part + 1) * pieces // parts, *args)


@shared
def _all_norms(parts: int, pieces: int, *args: Any) -> None:
    for part in numba.prange(parts):
        _norms(part * pieces // parts, (part + 1) * pieces // parts, *args)


@shared
def _read_all_columns(parts: int, pieces: int, *args: Any) -> None:
    for part in numba.prange(parts):
        _read_columns(part * pieces // parts, (part + 1) * pieces // parts, *args)


@shared
def _write_all_columns(parts: int, pieces: int, *args: Any) -> None:
    for part in numba.prange(parts):
        _write_columns(part * pieces // parts, (part + 1) * pieces // parts, *args)


@shared
def _read_all_rows(parts: int, pieces: int, *args: Any) -> None:
    for part in numba.prange(parts):
        _read_rows(part * pieces // parts, (part + 1) * pieces // parts, *args)


@shared
def _write_all_rows(parts: int, pieces: int, *args: Any) -> None:
    for part in numba.prange(parts):
        _write_rows(part * pieces // parts, (part + 1) * pieces // parts, *args)


@exact
def _copy_any(
    pages: np.ndarray,
    source_page: np.ndarray,
    source_slot: np.ndarray,
    target_page: np.ndarray,
    offsets: np.ndarray,
) -> None:
    block_size, size = offsets.shape
    held = np.empty((len(source_page), size), pages.dtype)
    for number in range(len(source_page)):
        page, slot = pages[source_page[number]], source_slot[number]
        for element in range(size):
            held[number, element] = page[offsets[slot, element]]
    for number in range(len(source_page)):
        page, slot = pages[target_page[number // block_size]], number % block_size
        for element in range(size):
            page[offsets[slot, element]] = held[number, element]

"""Stores in few bits on a CPU: decode attention and levels, compiled.

:mod:`vllm_kvevict.attention.stored` is the reference of attention and runs all other steps,
:func:`vllm_kvevict.ops.token_format.quantise` is the reference of levels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vllm_kvevict.ops.cpu.compiled import load_numba, run


@dataclass(frozen=True)
class Pages:
    """Pages of S sequences: those of sequence s are ``first[s]`` to ``first[s + 1] - 1`` of
    ``pages``.

    Args:
        first: [S + 1] int64.
        pages: [P] int64 page numbers in the cache.

    """

    first: torch.Tensor
    pages: torch.Tensor

    @classmethod
    def of(cls, table: torch.Tensor, used: torch.Tensor) -> "Pages":
        """Return the used entries [S, V] bool of a page table [S, V] int."""
        first = torch.zeros(len(table) + 1, dtype=torch.int64)
        first[1:] = used.sum(-1).cumsum(0)
        return cls(first, table[used].long())

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return self.first.numpy(), self.pages.numpy()


LEAST = -1e30
"""Maximum of the logits of no token: finite, so that its weight is 0 and not NaN."""


@lru_cache
def decode_kernel(
    head_size: int, key_bits: int, value_bits: int, groups: int
) -> Callable[..., None]:
    """Return the compiled attention of one query token of some sequences, for one head size.

    The kernel's arguments, for P pages of S sequences with G query heads each:

    - ``queries`` [S, G, D] float32, rotated and scaled;
    - ``added_logit`` [S, G] float32, added to every logit;
    - ``first`` [S + 1] int64: the pages of sequence s are ``first[s] .. first[s + 1] - 1`` of
    - ``pages`` [P] int64, page numbers in the cache;
    - ``keys`` and ``values`` [num_pages, T, D] uint8: codes, one tensor if both are in one byte;
    - ``scales`` [num_pages, T, 2 * groups] float16 as uint16, and ``halves`` [65536] float32,
      their numbers (:func:`numbers`);
    - ``softcap``, 0 for none;
    - ``top`` [S, G], ``total`` [S, G] and ``output`` [S, G, D] float32, written: maximum, sum of
      exponentials relative to it and weighted sum of values, rotated;
    - ``begin`` and ``end``: the sequences of this call.
    """
    numba = load_numba()
    joint = key_bits + value_bits <= 8
    shift, mask = (value_bits, (1 << value_bits) - 1) if joint else (0, 255)
    key_middle, value_middle = (2**key_bits - 1) / 2, (2**value_bits - 1) / 2
    size, width = head_size, head_size // groups
    key_middle, value_middle = np.float32(key_middle), np.float32(value_middle)

    @numba.njit(nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz"}, boundscheck=False)
    def kernel(
        queries: Any, added_logit: Any, first: Any, pages: Any, keys: Any, values: Any,
        scales: Any, halves: Any, softcap: Any, top: Any, total: Any, output: Any, begin: int,
        end: int,
    ) -> None:  # fmt: skip
        tokens, rows = keys.shape[1], queries.shape[1]
        logits = np.empty((rows, tokens), np.float32)
        code = np.empty(size, np.float32)
        sums = np.empty((rows, groups), np.float32)
        for s in range(begin, end):
            for g in range(rows):
                top[s, g] = LEAST
                total[s, g] = 0.0
                for d in range(size):
                    output[s, g, d] = 0.0
                for part in range(groups):
                    found = np.float32(0.0)
                    for d in range(part * width, (part + 1) * width):
                        found += queries[s, g, d]
                    sums[g, part] = found * key_middle
            for at in range(first[s], first[s + 1]):
                page = pages[at]
                for t in range(tokens):
                    for d in range(size):
                        code[d] = np.float32(keys[page, t, d] >> shift)
                    for g in range(rows):
                        found = added_logit[s, g]
                        for part in range(groups):
                            dot = np.float32(0.0)
                            for d in range(part * width, (part + 1) * width):
                                dot += queries[s, g, d] * code[d]
                            found += (dot - sums[g, part]) * halves[scales[page, t, part]]
                        logits[g, t] = found
                for g in range(rows):
                    highest = top[s, g]
                    for t in range(tokens):
                        if softcap > 0:
                            logits[g, t] = np.tanh(logits[g, t] / softcap) * softcap
                        highest = max(highest, logits[g, t])
                    fading = np.exp(top[s, g] - highest)
                    added = np.float32(0.0)
                    for t in range(tokens):
                        weight = np.exp(logits[g, t] - highest)
                        added += weight
                        logits[g, t] = weight
                    total[s, g] = total[s, g] * fading + added
                    top[s, g] = highest
                    for d in range(size):
                        output[s, g, d] *= fading
                for t in range(tokens):
                    for d in range(size):
                        code[d] = np.float32(values[page, t, d] & mask) - value_middle
                    for part in range(groups):
                        scale = halves[scales[page, t, groups + part]]
                        for g in range(rows):
                            weight = logits[g, t] * scale
                            for d in range(part * width, (part + 1) * width):
                                output[s, g, d] += weight * code[d]

    return kernel


@lru_cache
def tail_kernel(head_size: int, wide: bool) -> Callable[..., None]:
    """Return the compiled attention of the same sequences over the tokens of their tails.

    The kernel's arguments, in addition to those of the same name of :func:`decode_kernel`:

    - ``queries`` [S, G, D] float32, scaled and not rotated;
    - ``lengths`` [S] int64 tokens of each tail, in ``pages``;
    - ``cache`` [num_pages, elements]: all pages, as float32 if ``wide``, else as uint16 or uint8;
    - ``key_numbers`` and ``value_numbers`` [65536] or [256] float32: the key or value element that
      each bit pattern of ``cache`` stands for, its scale applied; not read if ``wide``;
    - ``key_places`` and ``value_places`` [block_size, D] int64 offsets of the elements in a page;
    - ``top``, ``total`` and ``output``, not rotated: read and updated.
    """
    numba, size = load_numba(), head_size

    @numba.njit(nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz"}, boundscheck=False)
    def kernel(
        queries: Any, first: Any, pages: Any, lengths: Any, cache: Any, key_numbers: Any,
        value_numbers: Any, key_places: Any, value_places: Any, softcap: Any, top: Any, total: Any,
        output: Any, begin: int, end: int,
    ) -> None:  # fmt: skip
        rows, block_size = queries.shape[1], key_places.shape[0]
        element = np.empty(size, np.float32)
        logits = np.empty((rows, block_size), np.float32)
        for s in range(begin, end):
            left = lengths[s]
            for at in range(first[s], first[s + 1]):
                page, count = cache[pages[at]], min(left, block_size)
                left -= count
                for t in range(count):
                    for d in range(size):
                        place = page[key_places[t, d]]
                        element[d] = place if wide else key_numbers[place]
                    for g in range(rows):
                        dot = np.float32(0.0)
                        for d in range(size):
                            dot += queries[s, g, d] * element[d]
                        logits[g, t] = dot
                for g in range(rows):
                    highest = top[s, g]
                    for t in range(count):
                        if softcap > 0:
                            logits[g, t] = np.tanh(logits[g, t] / softcap) * softcap
                        highest = max(highest, logits[g, t])
                    fading = np.exp(top[s, g] - highest)
                    added = np.float32(0.0)
                    for t in range(count):
                        weight = np.exp(logits[g, t] - highest)
                        added += weight
                        logits[g, t] = weight
                    total[s, g] = total[s, g] * fading + added
                    top[s, g] = highest
                    for d in range(size):
                        output[s, g, d] *= fading
                for t in range(count):
                    for d in range(size):
                        place = page[value_places[t, d]]
                        element[d] = place if wide else value_numbers[place]
                    for g in range(rows):
                        weight = logits[g, t]
                        for d in range(size):
                            output[s, g, d] += weight * element[d]

    return kernel


@lru_cache
def _levels_kernel(width: int, bits: int) -> Callable[..., None]:
    """Return the compiled choice of levels for groups of ``width`` elements.

    The kernel's arguments, for N groups: ``elements`` [N, width] float32, ``scales`` [N, C] float32
    to choose from, ``levels`` [N, width] uint8 and ``chosen`` [N] int64, written, and the groups of
    this call.
    """
    numba, middle = load_numba(), np.float32((2**bits - 1) / 2)

    @numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz"}, boundscheck=False)
    def kernel(elements: Any, scales: Any, levels: Any, chosen: Any, begin: int, end: int) -> None:
        for row in range(begin, end):
            least, best = np.float32(0.0), 0
            for choice in range(scales.shape[1]):
                scale, error = scales[row, choice], np.float32(0.0)
                for d in range(width):
                    level = np.rint(elements[row, d] / scale + middle)
                    level = min(max(level, np.float32(0.0)), middle + middle)
                    off = (level - middle) * scale - elements[row, d]
                    error += off * off
                if choice == 0 or error < least:
                    least, best = error, choice
            chosen[row] = best
            scale = scales[row, best]
            for d in range(width):
                level = np.rint(elements[row, d] / scale + middle)
                levels[row, d] = np.uint8(min(max(level, np.float32(0.0)), middle + middle))

    return kernel


def quantise(
    elements: torch.Tensor, scales: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose for each group the scale with the least squared error.

    Args:
        elements: [N, D] float32, finite.
        scales: [N, C] float32, above 0, the first one for equal errors.
        bits: Bits of a level.

    Returns:
        Levels [N, D] uint8 and the chosen scales [N].

    """
    levels = torch.empty(elements.shape, dtype=torch.uint8)
    chosen = torch.empty(len(elements), dtype=torch.int64)
    arrays = [one.contiguous().numpy() for one in (elements, scales)]
    kernel = _levels_kernel(elements.shape[1], bits)
    run(
        kernel, len(elements), *arrays, levels.numpy(), chosen.numpy(),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return levels, scales.gather(1, chosen[:, None])[:, 0]


@lru_cache
def numbers(dtype: torch.dtype, scale: float = 1.0) -> np.ndarray:
    """Return the numbers of all patterns of a type of 8 or 16 bits, times ``scale``: [256] or
    [65536] float32, in the order of the patterns as unsigned integers."""
    bits = 8 * dtype.itemsize
    patterns = torch.arange(1 << bits).to(torch.uint8 if bits == 8 else torch.int16)
    return (patterns.view(dtype).float() * scale).numpy()


def decode(
    queries: torch.Tensor,
    rotated: torch.Tensor,
    rotation: torch.Tensor,
    stored: Pages,
    planes: Sequence[torch.Tensor],
    bits: tuple[int, int],
    tail: Pages,
    lengths: torch.Tensor,
    cache: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    softcap: float,
    cache_scales: tuple[float, float] = (1.0, 1.0),
    added_logit: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend to stores and tails with one query token of each of S sequences.

    Args:
        queries: [S, G, D] float32, scaled.
        rotated: The same, rotated.
        rotation: [D, D] float32 rotation of the stored values.
        stored: Pages of the stores.
        planes: The planes of all pages of the cache (``TokenFormat.planes``).
        bits: Bits of the keys and of the values.
        tail: Pages of the tails.
        lengths: [S] int64 tokens in the tails.
        cache: [num_pages, elements] all pages, float32 or a floating-point type of 8 or 16 bits.
        places: Offsets [block_size, D] int64 of keys and of values in a page.
        softcap: Logit soft cap, 0 for none.
        cache_scales: Factors of the keys and of the values in ``cache``; 1 for float32.
        added_logit: [S, G] float32, added to the logits of stored tokens; None for 0.

    Returns:
        Maxima [S, G], sums of exponentials relative to them [S, G] and weighted sums of values
        [S, G, D], float32.

    """
    count, size = len(queries), queries.shape[-1]
    top = torch.empty(queries.shape[:2])
    total, output = torch.empty_like(top), torch.empty(queries.shape)
    scales = planes[-1].view(torch.int16).numpy().view(np.uint16)
    groups = scales.shape[-1] // 2
    cap = np.float32(softcap)
    added = torch.zeros_like(top) if added_logit is None else added_logit.contiguous()
    run(
        decode_kernel(size, *bits, groups), count, rotated.contiguous().numpy(), added.numpy(),
        *stored.arrays, planes[0].numpy(), planes[-2].numpy(), scales, numbers(torch.float16),
        cap, top.numpy(), total.numpy(), output.numpy(), threads=torch.get_num_threads(),
    )  # fmt: skip
    output = output @ rotation
    wide = cache.dtype == torch.float32
    if wide:
        held, tables = cache.numpy(), [np.empty(0, np.float32)] * 2
    else:
        unsigned = (torch.uint8, torch.uint16)[cache.dtype.itemsize - 1]
        held = cache.view(unsigned).numpy()
        tables = [numbers(cache.dtype, scale) for scale in cache_scales]
    run(
        tail_kernel(size, wide), count, queries.contiguous().numpy(), *tail.arrays,
        lengths.numpy(), held, *tables, *(one.numpy() for one in places), cap, top.numpy(),
        total.numpy(), output.numpy(), threads=torch.get_num_threads(),
    )  # fmt: skip
    return top, total, output

"""Attention over single pages on a CPU, compiled: pages of stores in few bits, and all others."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vllm_kvevict.ops.cpu.arithmetic import PART, arithmetic
from vllm_kvevict.ops.cpu.compiled import load_numba
from vllm_kvevict.ops.cpu.lanes import LANES, Strides, products

AT_ONCE = 4
"""Tokens or dimensions whose products are added to a sum at once. A page of a store is read to a
multiple of it: what follows its last token is in the page as well, and has the weight 0."""


@dataclass(frozen=True)
class Pages:
    """What is the same for all pages of a layer.

    Args:
        head_size: D, a multiple of :data:`AT_ONCE`.
        key_bits: Bits of an element of a stored key.
        value_bits: Bits of an element of a stored value.
        groups: Groups of dimensions with a scale of their own.
        tokens: Tokens of a store's page.
        block_size: Tokens of another page.
        dtype: Type of the elements in other pages: floating-point, of 8, 16 or 32 bits.
        keys: Offsets of the keys in other pages; None if they are not evenly spaced.
        values: The same of the values.

    """

    head_size: int
    key_bits: int
    value_bits: int
    groups: int
    tokens: int
    block_size: int
    dtype: torch.dtype
    keys: Strides | None
    values: Strides | None

    @property
    def joint(self) -> bool:
        """True if the codes of a key and of a value are in one byte."""
        return self.key_bits + self.value_bits <= 8

    @property
    def value_bytes(self) -> int:
        """Offset of the codes of the values."""
        return 0 if self.joint else self.head_size * self.tokens

    @property
    def reads_by_dimension(self) -> bool:
        """True if pages outside stores hold keys by dimension."""
        return self.keys is not None and self.keys.by_dimension

    @property
    def scale_bytes(self) -> int:
        """Offset of the scales."""
        return self.value_bytes + self.head_size * self.tokens


@lru_cache
def _weigh() -> Callable[..., Any]:
    """Return the compiled softmax of some more tokens of one query.

    Its arguments are ``logits`` [>= count] float32 in base 2, overwritten by the weights, their
    ``count``, and the maximum so far. It returns the maximum, the factor of what was summed
    relative to the former one, and the sum of the weights.
    """
    numba = load_numba()
    single, integer = np.float32, np.int32
    as_float, as_int, power, _ = arithmetic()

    @numba.njit(**PART)
    def ordered(number: Any) -> Any:
        """Map float32 bits to integers of the same order, and back: a maximum of integers runs on
        vectors although there may be NaN."""
        return integer(number ^ ((number >> integer(31)) & integer(0x7FFFFFFF)))

    @numba.njit(**PART)
    def weigh(logits: Any, count: int, top: Any) -> Any:
        highest = ordered(as_int(top))
        for t in range(count):
            highest = max(highest, ordered(as_int(logits[t])))
        highest = as_float(ordered(highest))
        added = single(0.0)
        for t in range(count):
            weight = power(logits[t] - highest)
            added += weight
            logits[t] = weight
        return highest, power(top - highest), added

    return weigh


@lru_cache
def _cap() -> Callable[..., Any]:
    """Return the compiled soft cap of logits: ``logits`` [>= count] hold twice the argument of
    tanh in base 2, and become ``cap * tanh``."""
    numba = load_numba()
    single, power = np.float32, arithmetic().power

    @numba.njit(**PART)
    def limit(logits: Any, count: int, cap: Any) -> None:
        for t in range(count):
            faded = power(-abs(logits[t]))
            capped = cap * (single(1.0) - faded) / (single(1.0) + faded)
            logits[t] = capped if logits[t] > single(0.0) else -capped

    return limit


@lru_cache
def store_kernel(pages: Pages) -> Callable[..., None]:
    """Return the compiled attention of G queries over one page of a store.

    Its arguments:

    - ``queries`` [G, D] float32, rotated and scaled, ``starts`` [G], which is added to their
      logits, and ``sums`` [G, groups], their sums times the middle of the levels;
    - ``page`` [bytes] uint8 and ``words`` [bytes / 2] uint16: the page;
    - ``cap``, 0 for none;
    - ``top`` [G], ``total`` [G] and ``output`` [G, D] float32, updated; ``output`` is rotated;
    - ``logits`` [G, >= tokens], ``element`` [AT_ONCE, >= D] and ``scales`` [>= tokens * 2 * groups]
      float32: for intermediate results.
    """
    numba, half, weigh, limit = load_numba(), arithmetic().half, _weigh(), _cap()
    size, tokens, groups = pages.head_size, pages.tokens, pages.groups
    width, at_values, at_scales = size // groups, pages.value_bytes, pages.scale_bytes // 2
    shift = pages.value_bits if pages.joint else 0
    mask = (1 << pages.value_bits) - 1
    single, integer = np.float32, np.int32
    middle = single((2**pages.value_bits - 1) / 2)

    @numba.njit(**PART)
    def kernel(
        queries: Any, starts: Any, sums: Any, page: Any, words: Any, cap: Any, top: Any,
        total: Any, output: Any, logits: Any, element: Any, scales: Any,
    ) -> None:  # fmt: skip
        rows = len(queries)
        packed = words[at_scales : at_scales + tokens * 2 * groups]
        for index in range(tokens * 2 * groups):
            scales[index] = half(packed[index])
        for begin in range(0, tokens, AT_ONCE):
            for u in range(AT_ONCE):
                codes, mine = page[(begin + u) * size : (begin + u + 1) * size], element[u]
                for d in range(size):
                    mine[d] = single(integer(codes[d] >> shift))
            for g in range(rows):
                query, logit = queries[g], logits[g]
                for u in range(AT_ONCE):
                    mine, found = element[u], starts[g]
                    for part in range(groups):
                        dot = single(0.0)
                        for d in range(width):
                            dot += query[part * width + d] * mine[part * width + d]
                        scale = scales[(begin + u) * 2 * groups + part]
                        found += (dot - sums[g, part]) * scale
                    logit[begin + u] = found
        for g in range(rows):
            logit, mine = logits[g], output[g]
            if cap > 0:
                limit(logit, tokens, cap)
            top[g], fading, added = weigh(logit, tokens, top[g])
            total[g] = total[g] * fading + added
            for d in range(size):
                mine[d] *= fading
            logit[tokens : tokens + AT_ONCE] = 0
        for begin in range(0, tokens, AT_ONCE):
            for u in range(AT_ONCE):
                first = at_values + (begin + u) * size
                codes, mine = page[first : first + size], element[u]
                for d in range(size):
                    mine[d] = single(integer(codes[d] & mask)) - middle
            a, b, c, d_ = element[0], element[1], element[2], element[3]
            for g in range(rows):
                logit, mine = logits[g], output[g]
                for part in range(groups):
                    at = begin * 2 * groups + groups + part
                    w, x = logit[begin] * scales[at], logit[begin + 1] * scales[at + 2 * groups]
                    y = logit[begin + 2] * scales[at + 4 * groups]
                    z = logit[begin + 3] * scales[at + 6 * groups]
                    for d in range(part * width, (part + 1) * width):
                        mine[d] += w * a[d] + x * b[d] + y * c[d] + z * d_[d]

    return kernel


@lru_cache
def tail_kernel(pages: Pages) -> Callable[..., None]:
    """Return the compiled attention of the same queries over the first tokens of another page.

    Its arguments, in addition to those of the same name of :func:`store_kernel`:

    - ``queries`` [G, D] float32, scaled and not rotated;
    - ``page`` [elements]: float32, or integers with the bits of other types;
    - ``count``: its tokens;
    - ``numbers`` [256] float32: the number of each pattern of 8 bits, not read for other types;
    - ``factors`` [2] float32, by which keys and values are multiplied;
    - ``places`` [2, block_size, D] int64: offsets of keys and of values, not read if they are
      evenly spaced;
    - ``output`` [G, D], not rotated.
    """
    numba, (_, _, _, half), weigh, limit = load_numba(), arithmetic(), _weigh(), _cap()
    as_float, single, integer = arithmetic().as_float, np.float32, np.int32
    size, dtype = pages.head_size, pages.dtype
    wide, brain, table = dtype.itemsize == 4, dtype == torch.bfloat16, dtype.itemsize == 1
    nowhere = Strides(0, (1, 1, 1, 1), (0, 0, 0, 0))
    by_dimension, even_values = pages.reads_by_dimension, pages.values is not None
    key_base, (_, inner, *_), (outer_step, inner_step, *_) = pages.keys or nowhere
    value_base, value_shape, value_steps = pages.values or nowhere
    multiply: Any = products(pages.keys, dtype) if by_dimension and pages.keys else None

    @numba.njit(**PART)
    def number(found: Any, numbers: Any) -> Any:
        if wide:
            return found
        if brain:
            return as_float(integer(integer(found) << integer(16)))
        return numbers[found] if table else half(found)

    @numba.njit(**PART)
    def read_value(page: Any, token: int, numbers: Any, places: Any, mine: Any) -> None:
        if even_values:
            inner, step = value_shape[1], value_steps[3]
            start = value_base + token // inner * value_steps[0] + token % inner * value_steps[1]
            for group in range(value_shape[2]):
                read = page[start + group * value_steps[2] :]
                part = mine[group * value_shape[3] : (group + 1) * value_shape[3]]
                for d in range(value_shape[3]):
                    part[d] = number(read[d * step], numbers)
        else:
            for d in range(size):
                mine[d] = number(page[places[1, token, d]], numbers)

    @numba.njit(**PART)
    def kernel(
        queries: Any, page: Any, count: int, numbers: Any, factors: Any, places: Any, cap: Any,
        top: Any, total: Any, output: Any, logits: Any, element: Any,
    ) -> None:  # fmt: skip
        rows = len(queries)
        if by_dimension:
            for begin in range(0, count, LANES):
                start = key_base + begin // inner * outer_step + begin % inner * inner_step
                for g in range(rows):
                    multiply(queries[g], page, start, logits[g], begin)
        else:
            for t in range(count):
                mine, of = element[0], places[0, t]
                for d in range(size):
                    mine[d] = number(page[of[d]], numbers)
                for g in range(rows):
                    query, dot = queries[g], single(0.0)
                    for d in range(size):
                        dot += query[d] * mine[d]
                    logits[g, t] = dot
        for g in range(rows):
            logit, mine = logits[g], output[g]
            for t in range(count):
                logit[t] *= factors[0]
            if cap > 0:
                limit(logit, count, cap)
            top[g], fading, added = weigh(logit, count, top[g])
            total[g] = total[g] * fading + added
            for d in range(size):
                mine[d] *= fading
            logit[count : count + AT_ONCE] = 0
        for begin in range(0, count, AT_ONCE):
            for u in range(AT_ONCE):
                if begin + u < count:
                    read_value(page, begin + u, numbers, places, element[u])
                else:
                    element[u] = 0
            a, b, c, d_ = element[0], element[1], element[2], element[3]
            for g in range(rows):
                logit, mine = logits[g], output[g]
                w, x = logit[begin] * factors[1], logit[begin + 1] * factors[1]
                y, z = logit[begin + 2] * factors[1], logit[begin + 3] * factors[1]
                for d in range(size):
                    mine[d] += w * a[d] + x * b[d] + y * c[d] + z * d_[d]

    return kernel

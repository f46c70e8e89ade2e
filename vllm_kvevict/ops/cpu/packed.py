"""Decode attention over stores in few bits on a CPU, compiled.

:mod:`vllm_kvevict.attention.stored` is its reference and runs all other steps.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vllm_kvevict.ops.cpu.arithmetic import PART, arithmetic
from vllm_kvevict.ops.cpu.compiled import intrinsics, load_numba, run
from vllm_kvevict.ops.cpu.lanes import LANES
from vllm_kvevict.ops.cpu.pages import AT_ONCE, Pages, store_kernel, tail_kernel

LEAST = np.float32(-1e30)
"""Maximum of the logits of no token: finite, so that its weight is 0 and not NaN."""

LOG2E = 1.4426950408889634


@lru_cache
def _decode_kernels(pages: Pages) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the compiled attention of sequences with one query token each, and its end.

    The arguments of both, for S sequences with G query heads each and at most N threads:

    - ``queries`` [S, G, D] float32;
    - ``sequences``: ``table`` [S, V] int32 pages, ``stored`` [S] int64 pages of a store at the left
      of each row, ``tail`` [S] int64 tokens in the pages after these;
    - ``held``, all pages: ``whole`` [num_pages, bytes] uint8, ``words`` [num_pages, bytes / 2]
      uint16, ``cache`` [num_pages, elements], and ``numbers``, ``factors`` and ``places`` of
      :func:`~vllm_kvevict.ops.cpu.pages.tail_kernel`;
    - ``layer``: ``factor``, by which queries are scaled, and ``cap``; ``rotation`` [D, D] float32
      of stored keys and values; ``centres`` [H, D] float32, of which row ``s % H`` is missing in
      the stored keys of sequence s, [0, D] for whole keys; ``sinks`` [S, G] float32 logits of
      attention sinks in base 2, [0, 0] for none;
    - ``found``, written: ``top`` [S, G] and ``total`` [S, G] float32, and ``output`` [S, G, D]
      float32, the attention;
    - ``rest``, written: ``owner`` [N] int64, the sequence of which an earlier thread attends to the
      first pages, -1 for none, and what a thread found of it, [N, ...] for each of ``found``.

    The tokens of all sequences in a row are divided between threads, at the beginnings of pages.
    """
    numba, store, attend_tail = load_numba(), store_kernel(pages), tail_kernel(pages)
    _, call = intrinsics()
    size, groups, tokens, block_size = (
        pages.head_size,
        pages.groups,
        pages.tokens,
        pages.block_size,
    )
    width, middle = size // groups, np.float32((2**pages.key_bits - 1) / 2)
    longest = max(tokens, block_size) + LANES
    single, power = np.float32, arithmetic().power

    @numba.njit(**PART)
    def turn(plain: Any, rotation: Any, centre: Any, turned: Any, starts: Any, sums: Any) -> None:
        """Rotate queries, and compute what is the same for the logits of all tokens."""
        for g in range(len(plain)):
            query, into = plain[g], turned[g]
            found = single(0.0)
            for d in range(size):
                found += query[d] * centre[d]
            starts[g] = found
            for i in range(size):
                row, dot = rotation[i], single(0.0)
                for d in range(size):
                    dot += row[d] * query[d]
                into[i] = dot
            for part in range(groups):
                found = single(0.0)
                for d in range(width):
                    found += into[part * width + d]
                sums[g, part] = found * middle

    @numba.njit(**PART)
    def turn_back(output: Any, rotation: Any, into: Any) -> None:
        """Rotate values that were summed."""
        for g in range(len(output)):
            mine = output[g]
            into[:] = 0
            for i in range(0, size, AT_ONCE):
                a, b, c, e = rotation[i], rotation[i + 1], rotation[i + 2], rotation[i + 3]
                w, x, y, z = mine[i], mine[i + 1], mine[i + 2], mine[i + 3]
                for d in range(size):
                    into[d] += w * a[d] + x * b[d] + y * c[d] + z * e[d]
            mine[:] = into

    @numba.njit(**PART)
    def body(
        queries: Any, sequences: Any, held: Any, layer: Any, found: Any, rest: Any, thread: int,
        threads: int,
    ) -> None:  # fmt: skip
        (table, stored, tail), (top, total, output) = sequences, found
        whole, words, cache, numbers, factors, places = held
        factor, cap, rotation, centres, _ = layer
        owner, tops, totals, outputs = rest
        rows, number = queries.shape[1], len(queries)
        logits = np.empty((rows, longest), single)
        element = np.empty((AT_ONCE, size), single)
        scales = np.zeros((tokens + AT_ONCE) * 2 * groups, single)
        plain, turned = np.empty((rows, size), single), np.empty((rows, size), single)
        sums, own = np.empty((rows, groups), single), np.empty(size, single)
        starts, nothing = np.empty(rows, single), np.zeros(size, single)
        everything = 0
        for s in range(number):
            everything += stored[s] * tokens + tail[s]
        low, high = everything * thread // threads, everything * (thread + 1) // threads
        after = 0
        for s in range(number):
            at, of_store = after, stored[s] * tokens
            after += of_store + tail[s]
            if after <= low or at >= high:
                continue
            if at < low:
                owner[thread] = s
                best, summed, result = tops[thread], totals[thread], outputs[thread]
            else:
                best, summed, result = top[s], total[s], output[s]
            best[:], summed[:], result[:] = LEAST, 0, 0
            for g in range(rows):
                mine, query = plain[g], queries[s, g]
                for d in range(size):
                    mine[d] = query[d] * factor
            # A page belongs to the thread of its first token.
            begin = max(0, -((at - low) // tokens))
            end = min(stored[s], -((at - high) // tokens))
            if begin < end:
                centre = centres[s % len(centres)] if len(centres) else nothing
                turn(plain, rotation, centre, turned, starts, sums)
                for place in range(begin, end):
                    page = table[s, place]
                    call(store, (
                        turned, starts, sums, whole[page], words[page], cap, best, summed, result,
                        logits, element, scales,
                    ))  # fmt: skip
                turn_back(result, rotation, own)
            at += of_store
            begin = max(0, -((at - low) // block_size))
            end = min(-(-tail[s] // block_size), -((at - high) // block_size))
            for place in range(begin, end):
                page = table[s, stored[s] + place]
                count = min(block_size, tail[s] - place * block_size)
                call(attend_tail, (
                    plain, cache[page], count, numbers, factors, places, cap, best, summed, result,
                    logits, element,
                ))  # fmt: skip

    @numba.njit(**PART)
    def end(queries: Any, sequences: Any, held: Any, layer: Any, found: Any, rest: Any) -> None:
        (top, total, output), (owner, tops, totals, outputs) = found, rest
        sinks = layer[4]
        rows = queries.shape[1]
        for thread in range(len(owner)):
            s = owner[thread]
            if s < 0:
                continue
            for g in range(rows):
                highest = max(top[s, g], tops[thread, g])
                mine, other = power(top[s, g] - highest), power(tops[thread, g] - highest)
                top[s, g] = highest
                total[s, g] = total[s, g] * mine + totals[thread, g] * other
                for d in range(size):
                    output[s, g, d] = output[s, g, d] * mine + outputs[thread, g, d] * other
        for s in range(len(queries)):
            for g in range(rows):
                divisor = total[s, g]
                if len(sinks):
                    # A sink far above all logits leaves nothing of the values, and no overflow.
                    over = sinks[s, g] - top[s, g]
                    sink = power(-abs(over))
                    divisor += sink if over < 0 else 1 / max(sink, single(1e-35))
                factor_ = single(1.0) / divisor
                mine = output[s, g]
                for d in range(size):
                    mine[d] *= factor_

    return body, end


class PackedPages:
    """The pages of a layer, as the compiled attention reads them.

    Args:
        pages: What is the same for all of them.
        held: [num_pages, elements] of ``pages.dtype``, contiguous: the cache.
        rotation: [D, D] float32 of stored keys and values.
        places: Offsets [block_size, D] int64 of keys and of values in pages outside stores.
        scale: Softmax scale.
        softcap: Logit soft cap, 0 for none.
        cache_scales: Factors of keys and values outside stores; 1 unless the cache is FP8.
        sinks: [H, G] logits of attention sinks, of any floating-point type; None for none.
        centres: [H, D] float32, without which keys are stored; None for whole keys.

    """

    def __init__(
        self,
        pages: Pages,
        held: torch.Tensor,
        rotation: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        softcap: float,
        cache_scales: tuple[float, float],
        sinks: torch.Tensor | None,
        centres: torch.Tensor | None = None,
    ) -> None:
        whole = held.view(torch.uint8)
        padded = -(-pages.tokens // AT_ONCE) * AT_ONCE
        assert pages.head_size % AT_ONCE == 0
        assert pages.value_bytes + padded * pages.head_size <= whole.shape[1]
        self._kernels = _decode_kernels(pages)
        cache = held if held.itemsize == 4 else held.view(PATTERNS[held.itemsize])
        numbers = np.zeros(256, np.float32)
        if held.itemsize == 1:
            numbers = torch.arange(256).to(torch.uint8).view(held.dtype).float().numpy()
        self._sinks = None if sinks is None else sinks.float() * LOG2E
        # The argument of tanh twice, because tanh is computed from the exponential of that.
        factor, cap = (2 * scale / softcap, softcap) if softcap else (scale, 0.0)
        nothing = torch.empty(0, pages.head_size)
        self._layer = (
            np.float32(factor * LOG2E),
            np.float32(cap * LOG2E),
            rotation.contiguous().numpy(),
            (nothing if centres is None else centres).contiguous().numpy(),
        )
        self._held = (
            whole.numpy(),
            held.view(torch.uint16).numpy(),
            cache.numpy(),
            numbers,
            np.array(cache_scales, np.float32),
            torch.stack(places).numpy(),
        )

    def decode(
        self, queries: torch.Tensor, table: np.ndarray, stored: np.ndarray, tail: np.ndarray
    ) -> torch.Tensor:
        """Attend to stores and tails with one query token of each of S sequences.

        Args:
            queries: [S, G, D] float32.
            table: [S, V] int32 pages of each sequence, contiguous: those of its store, then those
                of its tail.
            stored: [S] int64 pages of its store, contiguous.
            tail: [S] int64 tokens of its tail, at least 1.

        Returns:
            The attention [S, G, D] float32.

        """
        number, group, size = queries.shape
        threads, (body, end) = torch.get_num_threads(), self._kernels
        sinks = np.empty((0, 0), np.float32)
        if self._sinks is not None:
            sinks = self._sinks.repeat(number // len(self._sinks), 1).numpy()
        result = np.empty((number, group, size), np.float32)
        run(
            body,
            queries.contiguous().numpy(),
            (table, stored, tail),
            self._held,
            (*self._layer, sinks),
            (*np.empty((2, number, group), np.float32), result),
            (
                np.full(threads, -1),
                *np.empty((2, threads, group), np.float32),
                np.empty((threads, group, size), np.float32),
            ),
            threads=threads,
            after=end,
        )
        return torch.from_numpy(result)


PATTERNS = {1: torch.uint8, 2: torch.uint16}
"""Integers with the bits of elements of as many bytes."""

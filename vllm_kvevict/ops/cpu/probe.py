"""key_scores, compiled: pages read, the rotation taken out, probes and norms in one pass."""

from typing import Any

import numba
import numpy as np
import torch

from vllm_kvevict.ops.cpu.compiled import fast, shared
from vllm_kvevict.ops.cpu.pages import PAGES, arguments, fetch, unpack
from vllm_kvevict.ops.cpu.team import share
from vllm_kvevict.ops.places import Places
from vllm_kvevict.ops.reference.probe import Prose, Rotation

NO_PROSE = np.empty((0, 2), np.float32), np.empty((0, 0, 2), np.float32)


def key_scores(
    pages: torch.Tensor,
    index: torch.Tensor,
    places: Places,
    rotation: Rotation | None,
    weights: torch.Tensor,
    prose: Prose | None = None,
) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.host.key_scores`."""
    count = index.shape[1] * len(places.offsets)
    ages, of_ages = NO_PROSE if prose is None else [one.contiguous().numpy() for one in prose]
    channels = weights.shape[1] if prose is None else of_ages.shape[1]
    found = torch.empty(len(index), count, channels, device="cpu")
    cos = sin = np.empty((0, count), np.float32)
    if rotation is not None:
        cos, sin = (part.numpy() for part in rotation.by_pair)
    step, apart = (2, 1) if rotation is not None and rotation.interleaved else (1, len(cos))
    begin = 0 if rotation is None else rotation.first
    read = arguments(pages, index, places)
    said = weights.contiguous().numpy(), ages, of_ages, found.numpy()
    pieces = len(index) * -(-index.shape[1] // PAGES)
    share(_all_scores, _scores, pieces, *read, cos, sin, *said, begin, step, apart)
    return found


@fast
def _scores(
    first_piece: int,
    end_piece: int,
    pages: np.ndarray,
    index: np.ndarray,
    offsets: np.ndarray,
    first: int,
    by_token: int,
    by_element: int,
    shift: int,
    cos: np.ndarray,
    sin: np.ndarray,
    weights: np.ndarray,
    ages: np.ndarray,
    of_ages: np.ndarray,
    found: np.ndarray,
    begin: int,
    step: int,
    apart: int,
) -> None:
    """Scores [H, N, C], of which a piece is some pages of a head.

    Pair j is dimensions ``begin + step * j`` and ``apart`` after.
    """
    count = index.shape[1]
    block_size, size = offsets.shape
    pairs, channels = len(cos), weights.shape[1]
    steps = first, by_token, by_element
    bits = np.empty((2, PAGES * block_size), np.int32)
    keys = bits.view(np.float32)
    sums = np.empty((channels + 1, PAGES * block_size), np.float32)
    fetched = np.zeros(1, np.int64)
    parts = (count + PAGES - 1) // PAGES
    for piece in range(first_piece, end_piece):
        head, number = piece // parts, piece % parts * PAGES
        some = index[head, number : min(count, number + PAGES)]
        start, tokens = number * block_size, len(some) * block_size
        a, b, squares = keys[0, :tokens], keys[1, :tokens], sums[channels, :tokens]
        sums[:] = 0
        if by_token == 1:
            fetch(pages, some, first, (size - 1) * by_element + block_size, fetched)
        for pair in range(pairs):
            one = begin + step * pair
            other = one + apart
            unpack(pages, some, offsets, *steps, shift, one, bits[0])
            unpack(pages, some, offsets, *steps, shift, other, bits[1])
            c, s = cos[pair, start : start + tokens], sin[pair, start : start + tokens]
            for i in range(tokens):
                into = a[i] * c[i] + b[i] * s[i]
                beside = b[i] * c[i] - a[i] * s[i]
                squares[i] += into * into + beside * beside
                a[i] = into
                b[i] = beside
            for channel in range(channels):
                mine = sums[channel, :tokens]
                left, right = weights[head, channel, one], weights[head, channel, other]
                for i in range(tokens):
                    mine[i] += a[i] * left + b[i] * right
        for still in range(size - 2 * pairs):
            one = still if still < begin else still + 2 * pairs
            unpack(pages, some, offsets, *steps, shift, one, bits[0])
            for i in range(tokens):
                squares[i] += a[i] * a[i]
            for channel in range(channels):
                mine, left = sums[channel, :tokens], weights[head, channel, one]
                for i in range(tokens):
                    mine[i] += a[i] * left
        for i in range(tokens):
            squares[i] = np.sqrt(squares[i])
        for channel in range(channels):
            mine, theirs = sums[channel, :tokens], weights[head, channel, size:]
            for i in range(tokens):
                mine[i] += theirs[0] * squares[i] + theirs[1]
        for channel in range(found.shape[2]):
            mine = sums[channel, :tokens]
            if len(ages):
                more, theirs = sums[found.shape[2] + channel, :tokens], of_ages[head, channel]
                for i in range(tokens):
                    aged = theirs[0] * ages[start + i, 0] + theirs[1] * ages[start + i, 1]
                    mine[i] += max(more[i] + aged, np.float32(0))
            for i in range(tokens):
                found[head, start + i, channel] = mine[i]


@shared
def _all_scores(parts: int, pieces: int, *args: Any) -> None:
    for part in numba.prange(parts):
        _scores(part * pieces // parts, (part + 1) * pieces // parts, *args)

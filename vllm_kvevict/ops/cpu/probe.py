"""key_scores, compiled: pages read, the rotation taken out, probes and norms in one pass."""

import numpy as np
import torch

from vllm_kvevict.ops.cpu.compiled import fast
from vllm_kvevict.ops.cpu.pages import arguments, unpack
from vllm_kvevict.ops.places import Places
from vllm_kvevict.ops.reference.probe import Rotation

PAGES = 8
"""Pages at a time: what is made of them stays in the first caches."""


def key_scores(
    pages: torch.Tensor,
    index: torch.Tensor,
    places: Places,
    rotation: Rotation | None,
    weights: torch.Tensor,
) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.host.key_scores`."""
    count = index.shape[1] * len(places.offsets)
    found = torch.empty(len(index), count, weights.shape[1], device="cpu")
    cos = sin = np.empty((0, count), np.float32)
    if rotation is not None:
        cos, sin = (part.numpy() for part in rotation.by_pair)
    step, apart = (2, 1) if rotation is not None and rotation.interleaved else (1, len(cos))
    begin = 0 if rotation is None else rotation.first
    read = arguments(pages, index, places)
    _scores(*read, cos, sin, weights.contiguous().numpy(), found.numpy(), begin, step, apart)
    return found


@fast
def _scores(
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
    found: np.ndarray,
    begin: int,
    step: int,
    apart: int,
) -> None:
    """Scores [H, N, C]; pair j is dimensions ``begin + step * j`` and ``apart`` after."""
    heads, count = index.shape
    block_size, size = offsets.shape
    bits = np.empty((size, PAGES * block_size), np.int32)
    keys = bits.view(np.float32)
    sums = np.empty((weights.shape[1] + 1, PAGES * block_size), np.float32)
    for head in range(heads):
        for number in range(0, count, PAGES):
            some = min(PAGES, count - number)
            for one in range(some):
                page = pages[index[head, number + one]]
                unpack(page, offsets, first, by_token, by_element, shift, one * block_size, bits)
            start, tokens = number * block_size, some * block_size
            mine = found[head, start : start + tokens]
            _tile(keys, cos, sin, start, weights[head], sums, mine, begin, step, apart)


# Slices of two dimensions would have strides that the compiler does not know: no vectors.
@fast
def _tile(
    keys: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    start: int,
    weights: np.ndarray,
    sums: np.ndarray,
    found: np.ndarray,
    begin: int,
    step: int,
    apart: int,
) -> None:
    """Scores [n, C] of the first n of keys [D, ...], at the positions from ``start`` on."""
    size, count = len(keys), len(found)
    pairs, channels = len(cos), len(weights)
    sums[:] = 0
    squares = sums[channels, :count]
    for pair in range(pairs):
        one = begin + step * pair
        other = one + apart
        a, b = keys[one, :count], keys[other, :count]
        c, s = cos[pair, start : start + count], sin[pair, start : start + count]
        for channel in range(channels):
            mine = sums[channel, :count]
            left, right = weights[channel, one], weights[channel, other]
            for i in range(count):
                into = a[i] * c[i] + b[i] * s[i]
                beside = b[i] * c[i] - a[i] * s[i]
                mine[i] += into * left + beside * right
        for i in range(count):
            into = a[i] * c[i] + b[i] * s[i]
            beside = b[i] * c[i] - a[i] * s[i]
            squares[i] += into * into + beside * beside
    for still in range(size - 2 * pairs):
        dim = still if still < begin else still + 2 * pairs
        a = keys[dim, :count]
        for channel in range(channels):
            mine, left = sums[channel, :count], weights[channel, dim]
            for i in range(count):
                mine[i] += a[i] * left
        for i in range(count):
            squares[i] += a[i] * a[i]
    for channel in range(channels):
        of_norm, constant = weights[channel, size], weights[channel, size + 1]
        for i in range(count):
            found[i, channel] = sums[channel, i] + of_norm * np.sqrt(squares[i]) + constant

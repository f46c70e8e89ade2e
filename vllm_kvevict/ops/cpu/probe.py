"""key_scores, compiled: the rotation taken out, the probes and the norm in one pass."""

import numpy as np
import torch

from vllm_kvevict.ops.cpu.compiled import fast
from vllm_kvevict.ops.reference.probe import Rotation

TILE = 128
"""Tokens of a tile, whose sums stay in the first cache."""


def key_scores(
    keys: torch.Tensor, rotation: Rotation | None, weights: torch.Tensor
) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.reference.probe.key_scores`."""
    by_dim = keys.float().mT.contiguous()
    heads, _, count = by_dim.shape
    found = torch.empty(heads, count, weights.shape[1], device="cpu")
    cos = sin = np.empty((0, count), np.float32)
    if rotation is not None:
        cos, sin = (part.numpy() for part in rotation.by_pair)
    pairs = len(cos)
    step, apart = (2, 1) if rotation is not None and rotation.interleaved else (1, pairs)
    arrays = by_dim.numpy(), cos, sin, weights.contiguous().numpy(), found.numpy()
    _scores(*arrays, step, apart)
    return found


@fast
def _scores(
    keys: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    weights: np.ndarray,
    found: np.ndarray,
    step: int,
    apart: int,
) -> None:
    """Scores [H, N, C] of keys [H, D, N]; pair j is dimensions ``step * j`` and ``apart`` after."""
    heads, size, count = keys.shape
    pairs, channels = len(cos), weights.shape[1]
    sums = np.empty((channels + 1, TILE), np.float32)
    for head in range(heads):
        for start in range(0, count, TILE):
            end = min(start + TILE, count)
            length = end - start
            sums[:] = 0
            squares = sums[channels]
            for pair in range(pairs):
                first, second = step * pair, step * pair + apart
                a, b = keys[head, first, start:end], keys[head, second, start:end]
                c, s = cos[pair, start:end], sin[pair, start:end]
                for channel in range(channels):
                    mine = sums[channel]
                    left, right = weights[head, channel, first], weights[head, channel, second]
                    for i in range(length):
                        into = a[i] * c[i] + b[i] * s[i]
                        beside = b[i] * c[i] - a[i] * s[i]
                        mine[i] += into * left + beside * right
                for i in range(length):
                    into = a[i] * c[i] + b[i] * s[i]
                    beside = b[i] * c[i] - a[i] * s[i]
                    squares[i] += into * into + beside * beside
            for dim in range(2 * pairs, size):
                a = keys[head, dim, start:end]
                for channel in range(channels):
                    mine, left = sums[channel], weights[head, channel, dim]
                    for i in range(length):
                        mine[i] += a[i] * left
                for i in range(length):
                    squares[i] += a[i] * a[i]
            for channel in range(channels):
                of_norm, constant = weights[head, channel, size], weights[head, channel, size + 1]
                for i in range(length):
                    norm = np.sqrt(squares[i])
                    found[head, start + i, channel] = sums[channel, i] + of_norm * norm + constant

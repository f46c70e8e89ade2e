"""window_peaks, compiled: weights and their maxima in one pass over the logits."""

from typing import Any

import numba
import numpy as np
import torch

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.cpu.compiled import exact, fast, finite, shared
from vllm_kvevict.ops.cpu.team import share

LOGITS = 2**21
"""Most logits that stand in memory at once, unless one head has more: 8 MiB."""


def window_peaks(candidates: Candidates, kernel: int, reach: int) -> torch.Tensor:
    """As :func:`vllm_kvevict.ops.reference.defensive.window_peaks`."""
    queries, window = candidates.queries, candidates.window
    if queries is None or queries.shape[2] != window:
        raise ValueError(f"window attention needs the queries of the last {window} tokens")
    heads, width = candidates.valid.shape
    columns = max(width - window, candidates.num_candidates)
    padding = (~candidates.valid).sum(-1).numpy()
    rows = queries.float().flatten(1, 2) * candidates.scale
    sinks = np.full((heads, queries.shape[1]), -np.inf, dtype=np.float32)
    if candidates.sinks is not None:
        sinks = candidates.sinks.float().contiguous().numpy()
    peaks = torch.empty(heads, columns, device="cpu")
    at_once = max(1, LOGITS // (rows.shape[1] * width))
    for first in range(0, heads, at_once):
        some = slice(first, first + at_once)
        logits = torch.bmm(rows[some], candidates.keys[some].float().mT)
        if candidates.softcap:
            logits = logits.div_(candidates.softcap).tanh_().mul_(candidates.softcap)
        of_heads = logits.contiguous().numpy(), padding[some], sinks[some], peaks[some].numpy()
        share(_all_peaks, _peaks, len(logits), *of_heads, window, kernel, reach)
    return peaks


@finite
def _top(row: np.ndarray) -> np.float32:
    top = row[0]
    for i in range(row.shape[0]):
        top = max(top, row[i])
    return top


@exact
def _is_finite(row: np.ndarray) -> bool:
    """Whether all numbers of a row are finite: any other times 0 is NaN, and stays it."""
    lanes = np.zeros(16, np.float32)
    whole = row.shape[0] // 16 * 16
    for start in range(0, whole, 16):
        for lane in range(16):
            lanes[lane] += row[start + lane] * np.float32(0)
    for i in range(whole, row.shape[0]):
        lanes[0] += row[i] * np.float32(0)
    return lanes.sum() == 0


@finite
def _exponents(row: np.ndarray, top: np.float32, found: np.ndarray, powers: np.ndarray) -> None:
    """e to the power of (row - top), as ``found`` times the float32 of the bits ``powers``.

    Cody and Waite's reduction and the polynomial of the Cephes library: 2e-7 of the value.
    """
    for i in range(row.shape[0]):
        x = max(row[i] - top, np.float32(-87))
        whole = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
        r = x - whole * np.float32(0.693359375) - whole * np.float32(-2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        found[i] = p * r * r + r + np.float32(1)
        powers[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)


@fast
def _scaled(found: np.ndarray, powers: np.ndarray) -> np.float32:
    """Multiply the two, in ``found``, and sum up."""
    total = np.float32(0)
    for i in range(found.shape[0]):
        found[i] *= powers[i]
        total += found[i]
    return total


@finite
def _pooled_maxima(weights: np.ndarray, scale: np.float32, kernel: int, best: np.ndarray) -> None:
    """``best[i] = max(best[i], scale * (weights[i] + ... + weights[i + kernel - 1]))``."""
    count = best.shape[0]
    if kernel == 5:
        a, b, c = weights[:count], weights[1 : count + 1], weights[2 : count + 2]
        d, e = weights[3 : count + 3], weights[4 : count + 4]
        for i in range(count):
            best[i] = max(best[i], ((a[i] + b[i]) + (c[i] + d[i]) + e[i]) * scale)
        return
    for i in range(count):
        total = np.float32(0)
        for k in range(kernel):
            total += weights[i + k]
        best[i] = max(best[i], total * scale)


@finite
def _spread(best: np.ndarray, reach: int, found: np.ndarray) -> None:
    """The maximum of ``reach`` neighbours, and the mean at least."""
    count, half = best.shape[0], reach // 2
    found[:] = best
    for step in range(1, min(half, count - 1) + 1):
        before, after = best[: count - step], best[step:]
        later, sooner = found[step:], found[: count - step]
        for i in range(count - step):
            later[i] = max(later[i], before[i])
        for i in range(count - step):
            sooner[i] = max(sooner[i], after[i])
    total = np.float64(0)
    for i in range(count):
        total += found[i]
    mean = np.float32(total / count)
    for i in range(count):
        found[i] = max(found[i], mean)


@exact
def _peaks(
    first_head: int,
    end_head: int,
    logits: np.ndarray,
    padding: np.ndarray,
    sinks: np.ndarray,
    peaks: np.ndarray,
    window: int,
    kernel: int,
    reach: int,
) -> None:
    """Peaks [H, columns] of logits [H, G * w, width]; anything in the first ``padding`` columns."""
    rows, width = logits.shape[1:]
    half, columns = kernel // 2, peaks.shape[1]
    weights = np.zeros(width + 2 * half, np.float32)
    powers = np.empty(width, np.int32)
    factors = powers.view(np.float32)
    for head in range(first_head, end_head):
        first = padding[head]
        best = np.zeros(columns - first, np.float32)
        known = True
        for row in range(rows):
            seen = width - window + row % window + 1
            if seen <= first:
                # The head holds fewer tokens than the window has queries: this one came before.
                continue
            mine = logits[head, row, first:seen]
            count = seen - first
            if not _is_finite(mine):
                known = False
                break
            sink = sinks[head, row // window]
            top = max(_top(mine), sink)
            found = weights[half : half + count]
            _exponents(mine, top, found, powers)
            total = _scaled(found, factors[:count]) + np.exp(sink - top)
            # What the average must not see: the window, and a longer row before this one.
            inside = min(count, best.shape[0])
            weights[half + inside : half + inside + 2 * half] = 0
            scale = np.float32(1) / (total * np.float32(kernel))
            _pooled_maxima(weights, scale, kernel, best[: min(inside + half, best.shape[0])])
        peaks[head, :first] = 0
        if known:
            _spread(best, reach, peaks[head, first:])
        else:
            peaks[head] = np.nan


@shared
def _all_peaks(parts: int, pieces: int, *args: Any) -> None:
    for part in numba.prange(parts):
        _peaks(part * pieces // parts, (part + 1) * pieces // parts, *args)

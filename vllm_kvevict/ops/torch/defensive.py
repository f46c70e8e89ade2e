"""Defensive aggregation: the highest attention of any query of the window. Reference."""

from itertools import cycle

import torch
from torch.nn import functional

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.torch.buffers import Buffers
from vllm_kvevict.ops.torch.score import window_weights

BEFORE, AFTER = 2, 14
"""Number of tokens before and after a peak that have its attention.

What a query looks for follows what it attends to: between the name of an option and its default
stand up to a dozen tokens.
"""


def window_peaks(candidates: Candidates, kernel: int, before: int, after: int) -> torch.Tensor:
    """Return the highest attention of any query of the window to each token.

    The tokens are the candidates or all tokens before the window, whichever are more. Defensive
    aggregation (DefensiveKV, arXiv:2510.13334) replaces the mean over queries. Each row of weights,
    one per query head and window query, is averaged over ``kernel`` neighbours along the sequence;
    neighbours in the padding, in the window and beyond the ends count as zeros. Candidates in the
    window, if there are any, do not count as being in the window, and queries before them give them
    no attention.

    Then the maximum is taken over the rows of a KV head, and every peak covers ``before`` tokens
    before it and ``after`` tokens after it: a query attends to the words that name a fact, and to
    the fact itself only when it is generated, one token after the other. No token of a head is
    below the mean of that head's tokens.

    Args:
        candidates: One layer of one request.
        kernel: Width of the average in tokens, odd; 1 for none.
        before: Tokens before a peak that have its attention.
        after: Tokens after a peak that have its attention.

    Returns:
        [H, max(num_candidates, columns before the window)] float32; undefined if ``valid`` is
        False.

    Raises:
        ValueError: The candidates do not have ``window`` queries.

    """
    before_window = candidates.valid.shape[1] - candidates.window
    columns = max(before_window, candidates.num_candidates)
    peaks = torch.zeros(candidates.num_heads, columns, device=candidates.valid.device)
    for heads, _, weights in window_weights(candidates):
        highest = highest_sums(weights[..., :columns], kernel, candidates.buffers)
        torch.maximum(peaks[heads], highest, out=peaks[heads])
    valid = candidates.valid[:, :columns]
    peaks = (peaks / kernel).masked_fill(~valid, 0.0)
    peaks = covered(peaks, before, after)
    peaks.masked_fill_(~valid, 0.0)
    return peaks.maximum(peaks.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True))


def covered(peaks: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Return for each of N tokens the highest of the peaks that cover it.

    Args:
        peaks: [H, N], at least 0.
        before: Tokens before a peak that it covers.
        after: Tokens after a peak that it covers.

    Returns:
        [H, N] of the same type.

    """
    padded = functional.pad(peaks, (after, before))
    return functional.max_pool1d(padded, before + after + 1, stride=1)


def highest_sums(weights: torch.Tensor, kernel: int, buffers: Buffers) -> torch.Tensor:
    """Return the highest sum [h, N] over ``kernel`` neighbours in any of the rows [h, rows, N].

    Neighbours beyond the ends count as zeros.
    """
    half = kernel // 2
    # On a GPU launches cost more than the copy.
    if weights.shape[-1] < kernel or not weights.is_cpu:
        return _sums(functional.pad(weights, (half, half)), kernel, buffers).amax(1)
    # Only the ends are padded, because a padded copy of all columns takes as long as the sums.
    left = functional.pad(weights[..., : 2 * half], (half, 0))
    right = functional.pad(weights[..., weights.shape[-1] - 2 * half :], (0, half))
    parts = (left, weights, right) if half else (weights,)
    return torch.cat([_sums(part, kernel, buffers).amax(1) for part in parts], dim=-1)


def _sums(rows: torch.Tensor, kernel: int, buffers: Buffers) -> torch.Tensor:
    """Return sums [..., N - kernel + 1] over ``kernel`` neighbours, faster than torch's pooling.

    Sums of 2, 4, 8, ... neighbours are computed from each other, and adjacent sums that add up to
    ``kernel`` neighbours are combined. The result is valid until the buffers are used again.
    """
    count = rows.shape[-1] - kernel + 1
    width, done, total = 1, 0, None
    # The logits of these weights are no longer needed.
    names = cycle(("logits", "sums"))

    def added(name: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.add(first, second, out=buffers.take(name, first.shape, first.device))

    while 2 * width <= kernel:
        if kernel & width:
            part = rows[..., done : done + count]
            # The kernel is odd, so that the first part is one of the weights.
            total = part if total is None else added("total", total, part)
            done += width
        rows = added(next(names), rows[..., :-width], rows[..., width:])
        width *= 2
    last = rows[..., done : done + count]
    return last if total is None else last.add_(total)

"""defensive: the most attention that any query of the window gives a cached token. Reference."""

import torch
from torch.nn import functional

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.torch.score import window_weights


def window_peaks(candidates: Candidates, kernel: int, reach: int) -> torch.Tensor:
    """Highest attention that a query of the window gives each candidate, or each token before it.

    Defensive aggregation (DefensiveKV, arXiv:2510.13334) in the place of a mean. Each row of
    weights, one per query head and window query, is averaged over ``kernel`` neighbours along
    the sequence; neighbours in the padding, in the window and beyond the ends count as zeros.
    Candidates in the window, where there are such, are no neighbours in the window: queries that
    come before one give it nothing.
    Then the maximum over the rows of a KV head, and over ``reach`` neighbours, so that what is
    looked at stays whole: a query looks at the first words of a fact, and at the next when it has
    said those. No token of a head is below the mean of that head's tokens.

    Args:
        candidates: One layer of one request.
        kernel: Width of the average in tokens, odd; 1 for none.
        reach: Width of the maximum in tokens, odd; 1 for none.

    Returns:
        [H, max(num_candidates, columns before the window)] float32; means nothing where ``valid``
        is False.

    Raises:
        ValueError: The candidates carry no queries, or not ``window`` of them.

    """
    before_window = candidates.valid.shape[1] - candidates.window
    columns = max(before_window, candidates.num_candidates)
    peaks = torch.zeros(candidates.num_heads, columns, device=candidates.valid.device)
    for heads, weights in window_weights(candidates):
        highest = _highest_sums(weights[..., :columns], kernel)
        torch.maximum(peaks[heads], highest, out=peaks[heads])
    valid = candidates.valid[:, :columns]
    peaks = (peaks / kernel).masked_fill(~valid, 0.0)
    peaks = functional.max_pool1d(peaks, reach, stride=1, padding=reach // 2)
    peaks.masked_fill_(~valid, 0.0)
    return peaks.maximum(peaks.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True))


def _highest_sums(weights: torch.Tensor, kernel: int) -> torch.Tensor:
    """[h, N] highest sum over ``kernel`` neighbours in any of the rows [h, rows, N].

    Neighbours beyond the ends count as zeros.
    """
    half = kernel // 2
    if weights.shape[-1] < kernel:
        return _sums(functional.pad(weights, (half, half)), kernel).amax(1)
    # Only the ends are padded: a padded copy of all takes as long as the sums.
    left = functional.pad(weights[..., : 2 * half], (half, 0))
    right = functional.pad(weights[..., weights.shape[-1] - 2 * half :], (0, half))
    parts = (left, weights, right) if half else (weights,)
    return torch.cat([_sums(part, kernel).amax(1) for part in parts], dim=-1)


def _sums(rows: torch.Tensor, kernel: int) -> torch.Tensor:
    """[..., N - kernel + 1] sums over ``kernel`` neighbours. Faster than torch's pooling.

    Sums of 2, 4, 8, ... neighbours are made of each other; those that add up to ``kernel`` follow
    one another.
    """
    count = rows.shape[-1] - kernel + 1
    width, done, whole = 1, 0, None
    while 2 * width <= kernel:
        if kernel & width:
            part = rows[..., done : done + count]
            whole = part if whole is None else whole + part
            done += width
        rows = rows[..., :-width] + rows[..., width:]
        width *= 2
    last = rows[..., done : done + count]
    return last if whole is None else last.add_(whole)

"""Selection: the tokens that each KV head keeps, for given pages per head. Reference."""

import numpy as np
import torch


def select_tokens(scores: torch.Tensor, pages: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the columns of the ``block_size * pages`` highest scores of each head.

    Ties go to the lower column. Top-k per head is optimal for given head budgets (Ada-KV Theorem
    3.2).

    Args:
        scores: [L, H, N] float32, -inf on padding.
        pages: [L, H] int64 pages that each head keeps, with the same sum in every layer.
        block_size: Tokens in a page.

    Returns:
        [L, sum of pages * block_size] int64 kept columns, ascending in each head, heads of a layer
        concatenated.

    Raises:
        ValueError: A head has fewer tokens than its pages hold, or the layers' sums differ.

    """
    kept = pages * block_size
    per_layer = kept.sum(-1)
    padding = scores == float("-inf")
    if bool((kept > (~padding).sum(-1)).any()):
        raise ValueError("a head has fewer tokens than its pages hold")
    if bool((per_layer != per_layer[0]).any()):
        raise ValueError(f"layers keep different numbers of pages: {pages.sum(-1).tolist()}")
    # NaN ranks first, as in a sort.
    ranked = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    threshold = descending(ranked).gather(-1, kept[..., None] - 1)
    above, equal = ranked > threshold, ranked == threshold
    room = kept[..., None] - above.sum(-1, keepdim=True)
    columns = (above | (equal & (equal.cumsum(-1) <= room))).nonzero()[:, 2]
    return columns.view(scores.shape[0], -1)


def descending(scores: torch.Tensor) -> torch.Tensor:
    """Return rows sorted in descending order, NaN first.

    On a CPU, numpy sorts much faster than torch.
    """
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
    return scores.sort(dim=-1, descending=True).values

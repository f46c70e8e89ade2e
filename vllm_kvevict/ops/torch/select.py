"""select: the tokens each KV head keeps, once its pages are known. Reference."""

import numpy as np
import torch


def select_tokens(scores: torch.Tensor, pages: torch.Tensor, block_size: int) -> torch.Tensor:
    """Columns of the ``block_size * pages`` highest scores of each head; ties to the lower column.

    Top-k per head is optimal for given head budgets (Ada-KV Theorem 3.2).

    Args:
        scores: [L, H, N] float32, -inf on padding.
        pages: [L, H] int64: pages each head keeps, with the same sum in every layer.
        block_size: Tokens in a page.

    Returns:
        [L, sum of pages * block_size] int64: kept columns, ascending inside a head, the heads
        of a layer one after another.

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
    least = descending(ranked).gather(-1, kept[..., None] - 1)
    above, equal = ranked > least, ranked == least
    room = kept[..., None] - above.sum(-1, keepdim=True)
    columns = (above | (equal & (equal.cumsum(-1) <= room))).nonzero()[:, 2]
    return columns.view(scores.shape[0], -1)


def descending(scores: torch.Tensor) -> torch.Tensor:
    """Rows from the highest score to the lowest, NaN first. On a CPU numpy sorts far faster."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
    return scores.sort(dim=-1, descending=True).values

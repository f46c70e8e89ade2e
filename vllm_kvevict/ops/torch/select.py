"""Selection: the tokens that each KV head keeps, for given pages per head. Reference."""

import numpy as np
import torch

from vllm_kvevict.ops.torch.preconditions import require


def select_tokens(
    scores: torch.Tensor, pages: torch.Tensor, block_size: int, store_blocks: int | None = None
) -> torch.Tensor:
    """Return the columns of the ``block_size * pages`` highest scores of each head.

    Ties go to the lower column. Top-k per head is optimal for given head budgets (Ada-KV Theorem
    3.2).

    Args:
        scores: [L, H, N] float32, -inf on padding.
        pages: [L, H] int64 pages that each head keeps, with the same sum ``S * H`` in every layer.
        block_size: Tokens in a page.
        store_blocks: S; None reads the sum of the pages, for which the host of a GPU waits.

    Returns:
        [L, S * H * block_size] int64 kept columns, ascending in each head, heads of a layer
        concatenated.

    Raises:
        ValueError: A head has fewer tokens than its pages hold, or the layers' sums differ.

    """
    kept = pages * block_size
    total = int(pages[0].sum()) if store_blocks is None else store_blocks * pages.shape[1]
    require(
        kept <= (scores != float("-inf")).sum(-1),
        lambda: "a head has fewer tokens than its pages hold",
    )
    require(
        pages.sum(-1) == total,
        lambda: f"layers keep different numbers of pages: {pages.sum(-1).tolist()}",
    )
    # NaN ranks first, as in a sort.
    ranked = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    threshold = descending(ranked).gather(-1, kept[..., None] - 1)
    above, equal = ranked > threshold, ranked == threshold
    room = kept[..., None] - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    if scores.is_cpu:
        return chosen.nonzero()[:, 2].view(scores.shape[0], -1)
    return _indices(chosen, total * block_size)


def _indices(chosen: torch.Tensor, count: int) -> torch.Tensor:
    """Return the columns of the True elements of [L, H, N], ``count`` in each layer: [L, count].

    ``nonzero`` would wait for their number.
    """
    place = chosen.flatten(1).cumsum(-1)
    # All other columns are written to one more element, which is dropped.
    place = place.sub_(1).masked_fill_(~chosen.flatten(1), count)
    column = torch.arange(chosen.shape[-1], device=chosen.device).expand(chosen.shape).flatten(1)
    return column.new_empty(len(chosen), count + 1).scatter_(1, place, column)[:, :count]


def descending(scores: torch.Tensor) -> torch.Tensor:
    """Return rows sorted in descending order, NaN first.

    On a CPU, numpy sorts much faster than torch.
    """
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
    return scores.sort(dim=-1, descending=True).values

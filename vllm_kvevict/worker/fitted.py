"""Values of what an eviction keeps, fitted to the last queries of the window."""

import torch

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.ops.reference.fit import value_shift
from vllm_kvevict.policies.base import Candidates

ROWS = 16
"""Queries of each query head that values are fitted to, or the whole window if it is smaller."""


def fitted_values(
    cache: LayerCache,
    candidates: Candidates,
    grid: torch.Tensor,
    columns: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """What the pages of one layer's store are to hold as values.

    Args:
        cache: The layer's.
        candidates: What the layer holds before the eviction, with keys and queries.
        grid: [H, P] int64 pages of ``candidates``.
        columns: [K] int64 kept columns, heads concatenated.
        pages: [H] int64 pages that each head keeps.

    Returns:
        [K, D] in the cache's dtype, in the order of ``columns``.

    """
    held, width = candidates.valid.shape
    block_size = cache.layout.block_size
    values = cache.sequences(cache.values(grid))[:, :width].float()
    # Pages of padding may hold anything.
    values.masked_fill_(~candidates.valid[..., None], 0.0)
    heads = torch.arange(held, device=grid.device)
    owner = heads.repeat_interleave(pages * block_size, output_size=len(columns))
    kept = torch.zeros(
        held, candidates.num_candidates, dtype=torch.bool, device=grid.device
    ).index_put_((owner, columns), torch.tensor(True, device=grid.device))
    shift = value_shift(candidates, values, kept, min(ROWS, candidates.window))
    return (values[owner, columns] + shift[owner, columns]).to(cache.pages.dtype)

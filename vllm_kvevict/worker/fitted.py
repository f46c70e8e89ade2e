"""Values of what an eviction keeps, fitted to the last queries of the window."""

from dataclasses import replace

import torch

from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.ops.reference.fit import value_shift
from vllm_kvevict.policies.base import Candidates

ROWS = 16
"""Queries of each query head that values are fitted to, or the whole window if it is smaller."""

LOGITS = 2**22
"""Most logits that stand in memory at once, unless one head has more: 16 MiB."""


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
    assert candidates.queries is not None
    rows = min(ROWS, candidates.window)
    heads, width = candidates.valid.shape
    at_once = max(1, LOGITS // (candidates.queries.shape[1] * rows * width))
    kept = columns.split((pages * cache.layout.block_size).tolist())
    found = []
    for first in range(0, heads, at_once):
        some = slice(first, first + at_once)
        part = replace(
            candidates,
            keys=candidates.keys[some],
            valid=candidates.valid[some],
            queries=candidates.queries[some],
            sinks=None if candidates.sinks is None else candidates.sinks[some],
        )
        values = cache.value_sequences(grid[some])[:, :width]
        if not bool(part.valid.all()):
            # Pages of padding may hold anything.
            values.masked_fill_(~part.valid[..., None], 0.0)
        shift = value_shift(part, values, kept[some], rows)
        found += [
            held[mine] + moved for held, mine, moved in zip(values, kept[some], shift, strict=True)
        ]
    return torch.cat(found).to(cache.pages.dtype)

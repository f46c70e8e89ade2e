"""Candidate rows on CUDA: offsets of candidates in the flat scores and of survivors."""

from dataclasses import dataclass

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations


@dataclass(frozen=True)
class Rows:
    """Candidate rows of due evictions, the input of allocation and selection.

    Args:
        start: [E * L, H] int64 index of each head's first score.
        length: [E * L, H] int32 number of each head's scores.
        caps: [E * L, H] int32 pages of a store that each head's candidates fill.
        first_kept: [E * L] int64 index of a layer's first kept column.
        store_blocks: [E * L] int32: S.

    """

    start: torch.Tensor
    length: torch.Tensor
    caps: torch.Tensor
    first_kept: torch.Tensor
    store_blocks: torch.Tensor


def candidate_rows(batch: EvictionBatch, head_indptr: torch.Tensor) -> Rows:
    """Return the candidate rows of a batch, computed in one launch.

    Args:
        batch: The due evictions.
        head_indptr: [L, rows, H + 1] int32 head split before this eviction.

    Raises:
        RuntimeError: A shape, dtype or device is not as above.

    """
    groups, device = len(batch.due) * batch.num_layers, head_indptr.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    heads = (groups, batch.num_heads)
    rows = Rows(
        start=empty(*heads, dtype=torch.int64),
        length=empty(*heads),
        caps=empty(*heads),
        first_kept=empty(groups, dtype=torch.int64),
        store_blocks=empty(groups),
    )
    tables = (batch.requests, head_indptr, batch.block_size, batch.page_tokens)
    operations(head_indptr).rows(*vars(rows).values(), *tables)
    return rows

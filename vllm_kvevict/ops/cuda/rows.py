"""rows on CUDA: where each head's candidates lie in the flat scores, and where survivors go."""

from dataclasses import dataclass

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations


@dataclass(frozen=True)
class Rows:
    """What allocate and select read of due evictions.

    Args:
        start: [E * L, H] int64 first score of a head.
        length: [E * L, H] int32 its scores.
        caps: [E * L, H] int32 pages of them.
        first_kept: [E * L] int64 first kept column of a layer.
        store_blocks: [E * L] int32: S.

    """

    start: torch.Tensor
    length: torch.Tensor
    caps: torch.Tensor
    first_kept: torch.Tensor
    store_blocks: torch.Tensor


def candidate_rows(batch: EvictionBatch, head_indptr: torch.Tensor) -> Rows:
    """The rows of a batch, in one launch.

    Args:
        batch: The due evictions.
        head_indptr: [L, rows, H + 1] int32: the split before this eviction.

    Raises:
        RuntimeError: A shape, dtype or device is not as above.

    """
    groups, device = len(batch.due) * batch.num_layers, head_indptr.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    heads = (groups, batch.num_heads)
    made = Rows(
        start=empty(*heads, dtype=torch.int64),
        length=empty(*heads),
        caps=empty(*heads),
        first_kept=empty(groups, dtype=torch.int64),
        store_blocks=empty(groups),
    )
    tables = (batch.requests, head_indptr, batch.block_size)
    operations(head_indptr).rows(*vars(made).values(), *tables)
    return made

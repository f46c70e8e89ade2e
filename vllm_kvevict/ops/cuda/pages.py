"""compact on CUDA: survivors to their stores."""

from collections.abc import Sequence

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations


def compact(
    caches: Sequence[torch.Tensor],
    columns: torch.Tensor,
    pages: torch.Tensor,
    batch: EvictionBatch,
    head_indptr: torch.Tensor,
    old_store: torch.Tensor,
) -> None:
    """Copy the survivors of due evictions to their stores, all layers in one launch.

    Args:
        caches: [blocks, H, block_size, slot] contiguous each, any dtype, written in place. A slot
            holds everything that belongs to a (token, head): key, value, and scales if any.
        columns: [batch.kept_columns] int32: kept columns of each head, ascending, counted
            from the head's first candidate; requests, then layers, then heads in order.
        pages: [E, L, H] int32: pages each head keeps.
        batch: The due evictions.
        head_indptr: [L, rows, H + 1] int32: the split before this eviction.
        old_store: [rows, S] int32: the store before this eviction; rows may lie apart.

    Raises:
        RuntimeError: A shape, dtype, stride or device is not as above.

    """
    operations(columns).compact(
        list(caches),
        columns,
        pages,
        batch.store,
        batch.requests,
        head_indptr,
        old_store,
        batch.positional,
    )

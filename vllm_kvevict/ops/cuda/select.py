"""select on CUDA: the tokens each KV head keeps, once its pages are known."""

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations
from vllm_kvevict.ops.cuda.rows import Rows


def batch_columns(
    batch: EvictionBatch, scores: torch.Tensor, pages: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """Kept columns of due evictions, as ``compact`` takes them.

    Args:
        batch: The due evictions.
        scores: [batch.columns] float32.
        pages: [E, L, H] int32: pages each head keeps.
        rows: Of the batch, before this eviction.

    Returns:
        [batch.kept_columns] int32: columns counted from each head's first candidate, ascending;
        requests, then layers, then heads in order.

    Raises:
        RuntimeError: A shape, dtype or device is not as above.

    """
    columns = torch.empty(batch.kept_columns, dtype=torch.int32, device=scores.device)
    operations(scores).select(
        columns,
        scores,
        rows.start,
        rows.length,
        pages.flatten(0, 1),
        rows.first_kept,
        batch.block_size,
    )
    return columns

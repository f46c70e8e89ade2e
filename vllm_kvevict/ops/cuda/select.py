"""Selection on CUDA: the tokens that each KV head keeps, for given pages per head."""

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations
from vllm_kvevict.ops.cuda.rows import Rows


def batch_columns(
    batch: EvictionBatch, scores: torch.Tensor, pages: torch.Tensor, rows: Rows
) -> torch.Tensor:
    """Return the kept columns of due evictions, the input of ``compact``.

    Args:
        batch: The due evictions.
        scores: [batch.columns] float32.
        pages: [E, L, H] int32 pages that each head keeps.
        rows: Candidate rows of the batch, before this eviction.

    Returns:
        [batch.kept_columns] int32 columns, ascending, counted from each head's first candidate, in
        the order of requests, layers and heads.

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
        batch.page_tokens,
    )
    return columns

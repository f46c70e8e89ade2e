"""select on CUDA: the tokens each KV head keeps, once its pages are known."""

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations
from vllm_kvevict.ops.cuda.rows import Rows


def select_tokens(
    scores: torch.Tensor, pages: torch.Tensor, block_size: int, store_blocks: int
) -> torch.Tensor:
    """The reference's ``select_tokens``, without reading back.

    Args:
        scores: [L, H, N] float32, -inf on padding.
        pages: [L, H] int64: pages each head keeps. That a head has as many tokens is asserted on
            the device.
        block_size: Tokens in a page.
        store_blocks: S: the pages of every layer sum to ``S * H``.

    Returns:
        [L, S * H * block_size] int64: kept columns, ascending inside a head, the heads of a layer
        one after another.

    """
    num_layers, num_heads, length = scores.shape
    kept = store_blocks * num_heads * block_size
    index = torch.arange(num_layers * num_heads, device=scores.device).view(num_layers, num_heads)
    columns = torch.empty(num_layers * kept, dtype=torch.int32, device=scores.device)
    operations(scores).select(
        columns,
        scores.contiguous().view(-1),
        index * length,
        torch.full_like(pages, length, dtype=torch.int32),
        pages.int(),
        torch.arange(num_layers, device=scores.device) * kept,
        block_size,
    )
    return columns.view(num_layers, kept).long()


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

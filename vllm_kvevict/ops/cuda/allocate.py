"""Allocation on CUDA: the pages of a layer's store, divided between its KV heads."""

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch, to_device
from vllm_kvevict.ops.cuda.extension import operations
from vllm_kvevict.ops.cuda.rows import Rows


def batch_pages(
    batch: EvictionBatch, scores: torch.Tensor, rows: Rows, floor: float
) -> torch.Tensor:
    """Return the pages of every head in due evictions (Ada-KV Algorithm 2 with whole pages).

    Args:
        batch: The due evictions.
        scores: [batch.columns] float32.
        rows: Candidate rows of the batch, before this eviction.
        floor: Share of each S, in [0, 1], that every head keeps; at least one page.

    Returns:
        [E, L, H] int32; the pages of a layer sum to ``S * H`` of its request.

    Raises:
        RuntimeError: A shape, dtype or device is not as above, or floor is out of range.

    """
    pages = torch.empty_like(rows.caps)
    # Workspaces of the sort: eight bytes per score, and eight per page of scores.
    keys, other = (torch.empty_like(scores, dtype=torch.int32) for _ in range(2))
    gains = torch.empty(len(scores) // batch.page_tokens, dtype=torch.int64, device=scores.device)
    operations(scores).allocate(
        pages,
        keys,
        other,
        gains,
        scores,
        rows.start,
        rows.length,
        rows.caps,
        rows.store_blocks,
        batch.page_tokens,
        floor,
    )
    return pages.view(len(batch.due), batch.num_layers, batch.num_heads)


def batch_shared_pages(batch: EvictionBatch, shares: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the pages of every head in due evictions, by fixed shares.

    The result is bit-identical to ``shared_pages`` of ``ops/torch``, because both divide in
    float64. Every head gets the pages of its protected tokens first, and shares divide the others.

    Args:
        batch: The due evictions.
        shares: [L, H] float64, above 0, contiguous.
        rows: Candidate rows of the batch, before this eviction.

    Returns:
        [E, L, H] int32; the pages of a layer sum to ``S * H`` of its request.

    Raises:
        RuntimeError: A shape, dtype or device is not as above.

    """
    pages, caps, store_blocks = torch.empty_like(rows.caps), rows.caps, rows.store_blocks
    gains = torch.empty(batch.columns // batch.page_tokens, dtype=torch.int64, device=shares.device)
    first = None
    if any(due.protect_first for due in batch.due):
        protected = [
            [-(-due.protect_first // batch.page_tokens)]
            for due in batch.due
            for _ in range(batch.num_layers)
        ]
        first = to_device(protected, torch.int32, shares.device)
        caps, store_blocks = caps - first, store_blocks - first.flatten()
    operations(shares).allocate_shares(
        pages, gains, shares, rows.start, caps, store_blocks, batch.page_tokens
    )
    if first is not None:
        pages += first
    return pages.view(len(batch.due), batch.num_layers, batch.num_heads)

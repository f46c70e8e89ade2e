"""allocate on CUDA: the pages of a layer's store, shared between its KV heads."""

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations
from vllm_kvevict.ops.cuda.rows import Rows


def adaptive_pages(
    scores: torch.Tensor, caps: torch.Tensor, store_blocks: int, block_size: int, floor: float
) -> torch.Tensor:
    """The reference's ``adaptive_pages``, without reading back: same arguments, same result.

    Args:
        scores: [L, H, N] float32, N a multiple of ``block_size``, -inf on padding.
        caps: [L, H] int64: pages of candidates each head has, at most ``N // block_size``. That the
            caps of a layer sum to ``S * H`` is asserted on the device.
        store_blocks: S.
        block_size: Tokens in a page.
        floor: Share of S, in [0, 1], that every head keeps; never less than one page, and
            never more than the head's cap.

    Returns:
        [L, H] int64, each row summing to ``S * H``.

    Raises:
        ValueError: A size is out of range.

    """
    num_layers, num_heads, columns = scores.shape
    if store_blocks < 1 or columns % block_size or not 0 <= floor <= 1:
        raise ValueError("store_blocks must be at least 1, N whole pages, and floor in [0, 1]")
    start = torch.arange(num_layers * num_heads, device=scores.device) * columns
    pages = _allocate(
        scores.contiguous().view(-1),
        start.view(num_layers, num_heads),
        torch.full_like(caps, columns, dtype=torch.int32),
        caps.int(),
        torch.full((num_layers,), store_blocks, dtype=torch.int32, device=scores.device),
        block_size,
        floor,
    )
    return pages.long()


def batch_pages(
    batch: EvictionBatch, scores: torch.Tensor, rows: Rows, floor: float
) -> torch.Tensor:
    """Pages of every head of due evictions (Ada-KV Algorithm 2 in whole pages).

    Args:
        batch: The due evictions.
        scores: [batch.columns] float32.
        rows: Of the batch, before this eviction.
        floor: Share of each S, in [0, 1], that every head keeps; never less than one page.

    Returns:
        [E, L, H] int32; the pages of a layer sum to ``S * H`` of its request.

    Raises:
        RuntimeError: A shape, dtype or device is not as above, or floor is out of range.

    """
    pages = _allocate(
        scores,
        rows.start,
        rows.length,
        rows.caps,
        rows.store_blocks,
        batch.block_size,
        floor,
    )
    return pages.view(len(batch.due), batch.num_layers, batch.num_heads)


def _allocate(
    scores: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    caps: torch.Tensor,
    store_blocks: torch.Tensor,
    block_size: int,
    floor: float,
) -> torch.Tensor:
    """Sorts into workspaces: eight bytes a score, and eight a page of scores."""
    pages = torch.empty_like(caps)
    keys, other = (torch.empty_like(scores, dtype=torch.int32) for _ in range(2))
    gains = torch.empty(len(scores) // block_size, dtype=torch.int64, device=scores.device)
    operations(scores).allocate(
        pages, keys, other, gains, scores, start, length, caps, store_blocks, block_size, floor
    )
    return pages

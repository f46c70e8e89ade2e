"""The page table of evicted requests, and compaction, on CUDA."""

from collections.abc import Sequence

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations


def table_width(
    store_blocks: int, num_heads: int, tail_start: int, num_tokens: int, block_size: int
) -> int:
    """Columns that hold the pages of any head of a request.

    A head has at most all store pages but one for each other head, and never more than the
    request had blocks before its tail.

    Args:
        store_blocks: S, 0 for a request that is not evicted.
        num_heads: H.
        tail_start: T in tokens, 0 for a request that is not evicted.
        num_tokens: Logical length.
        block_size: Tokens in a page.

    """
    store_pages = max(0, (store_blocks - 1) * num_heads + 1)
    tail_blocks = -(-(num_tokens - tail_start) // block_size)
    return min(store_pages, tail_start // block_size) + tail_blocks


def head_page_table(
    table: torch.Tensor,
    lengths: torch.Tensor,
    head_indptr: torch.Tensor,
    store: torch.Tensor,
    tail_start: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> None:
    """The rectangular table attention wants: one sequence per (request, KV head).

    The reference's ``head_page_table`` on rows of the state tables, written to fixed addresses:
    a CUDA graph may record it. A request with tail start 0 is not evicted and has its positional
    blocks alone. A row of -1 pads the batch: no tokens.

    Args:
        table: [L, R * H, V] int32, overwritten, unused entries 0; V at least the
            :func:`table_width` of every request.
        lengths: [L, R * H] int32, overwritten: cached tokens.
        head_indptr: [L, rows, H + 1] int32.
        store: [rows, S] int32 block ids; rows may lie apart.
        tail_start: [rows] int32.
        rows: [R] int32 rows of the requests.
        seq_lens: [R] int32 logical lengths.
        block_table: [R, W] int32: vLLM's positional block table; rows may lie apart.
        block_size: Tokens in a page.

    Raises:
        RuntimeError: A shape, dtype, stride or device is not as above.

    """
    operations(table).head_page_table(
        table, lengths, head_indptr, store, tail_start, rows, seq_lens, block_table, block_size
    )


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

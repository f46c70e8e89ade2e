"""Compaction on CUDA: copies survivors to their stores, or packs them in few bits."""

from collections.abc import Sequence

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations
from vllm_kvevict.ops.cuda.packed import format_arguments
from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat

STAGING_BYTES = 2**26
"""Bytes of the staging buffer of evictions in place, unless one layer of a request needs more."""


def compact(
    caches: Sequence[torch.Tensor],
    columns: torch.Tensor,
    pages: torch.Tensor,
    batch: EvictionBatch,
    head_indptr: torch.Tensor,
    old_store: torch.Tensor,
    token_format: TokenFormat = AS_CACHED,
    scales: Sequence[tuple[float, float]] = (),
    centres: torch.Tensor | None = None,
) -> None:
    """Copy the survivors of due evictions to their stores, all layers in one launch.

    Evictions in place, which come last in the batch, take two launches for as many layers and
    requests as :data:`STAGING_BYTES` hold: all tokens are read before any is written.

    Args:
        caches: [blocks, H, block_size, slot] contiguous each, any dtype, written in place. A slot
            holds everything that belongs to a (token, head): key, value, and scales if any.
        columns: [batch.kept_columns] int32: kept columns of each head, ascending, counted
            from the head's first candidate, in the order of requests, layers and heads.
        pages: [E, L, H] int32 pages that each head keeps.
        batch: The due evictions.
        head_indptr: [L, rows, H + 1] int32 head split before this eviction.
        old_store: [rows, S] int32 store before this eviction; rows may be strided.
        token_format: Format of the tokens of stores, old and new. One in few bits needs slots of a
            key and a value of the same size.
        scales: Scales of the keys and the values of each layer's FP8 cache; empty for none. Read
            for a format in few bits only.
        centres: [L, H, D] float32, without which a format in few bits stores keys; contiguous.

    Raises:
        RuntimeError: A shape, dtype, stride or device is not as above.
        ValueError: An eviction in place precedes one that is not.

    """
    given = scales or [(1.0, 1.0)] * len(caches)
    packed = (
        *format_arguments(token_format, caches[0].shape[3] // 2, centres, columns.device),
        [of_keys for of_keys, _ in given],
        [of_values for _, of_values in given],
    )
    in_place = [due.in_place for due in batch.due]
    if in_place != sorted(in_place):
        raise ValueError("evictions in place must come last in a batch")

    def move(start: int, stop: int, staging: torch.Tensor) -> None:
        part = slice(start, stop)
        operations(columns).compact(
            list(caches),
            columns,
            pages[part],
            batch.store[part],
            batch.requests[part],
            head_indptr,
            old_store,
            batch.positional[part],
            staging,
            batch.page_tokens,
            *packed,
        )

    fresh, count = in_place.count(False), len(in_place)
    bytes_ = torch.empty(0, dtype=torch.uint8, device=columns.device)
    if fresh:
        move(0, fresh, bytes_)
    if fresh == count:
        return
    layer = batch.store.shape[1] * caches[0][0].nbytes
    at_once = max(1, STAGING_BYTES // layer)
    requests = min(count - fresh, max(1, at_once // len(caches)))
    staging = bytes_.new_empty(min(at_once, requests * len(caches)) * layer)
    for start in range(fresh, count, requests):
        move(start, min(start + requests, count), staging)

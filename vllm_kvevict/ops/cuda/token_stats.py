"""keep on CUDA: numbers beside the survivors of due evictions."""

from collections.abc import Sequence

import torch

from vllm_kvevict.ops.cuda.batch import EvictionBatch
from vllm_kvevict.ops.cuda.extension import operations


def keep_page_values(
    kept: Sequence[torch.Tensor],
    made: torch.Tensor,
    columns: torch.Tensor,
    pages: torch.Tensor,
    batch: EvictionBatch,
    head_indptr: torch.Tensor,
    old_store: torch.Tensor,
) -> None:
    """Write the numbers of survivors beside where :func:`.pages.compact` puts them.

    Args:
        kept: [pages, block_size, C] float32 each, contiguous; the first c channels are written.
        made: [c, batch.columns] float32: numbers of every candidate.
        columns: As ``compact`` takes them; ``pages``, ``head_indptr``, ``old_store`` likewise.
        pages: As said.
        batch: The due evictions.
        head_indptr: As said.
        old_store: As said.

    Raises:
        RuntimeError: A shape, dtype or device is not as above.

    """
    tables = (batch.store, batch.requests, head_indptr, old_store, batch.positional)
    operations(made).keep_page_values(list(kept), made, columns, pages, *tables)

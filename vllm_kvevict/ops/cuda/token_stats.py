"""Token stats on CUDA: writes the floats of the survivors of due evictions."""

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
    """Write the floats of survivors to the slots to which :func:`.pages.compact` moves them.

    Args:
        kept: [pages, page_tokens, C] float32 each, contiguous; the first c channels are written.
        made: [c, batch.columns] float32 floats of every candidate.
        columns: As in :func:`.pages.compact`.
        pages: As in :func:`.pages.compact`.
        batch: The due evictions.
        head_indptr: As in :func:`.pages.compact`.
        old_store: As in :func:`.pages.compact`.

    Raises:
        RuntimeError: A shape, dtype or device is not as above.

    """
    tables = (batch.store, batch.requests, head_indptr, old_store, batch.positional)
    operations(made).keep_page_values(list(kept), made, columns, pages, *tables, batch.block_size)

"""observe on CUDA: the last queries of a step to the observation rings."""

import torch

from vllm_kvevict.ops.cuda.extension import operations


def observe(
    rings: torch.Tensor,
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    ring: torch.Tensor,
    window: int,
    max_query_len: int,
) -> None:
    """As the reference's ``observe`` at the indices of its ``observe_index``, in one launch.

    A CUDA graph may record it: the launch depends on shapes, ``window`` and ``max_query_len``
    alone.

    Args:
        rings: [slots * window, query heads, D], written in place.
        query: [T, query heads, D] of the same dtype; tokens may lie apart.
        query_start_loc: [R + 1] int32.
        seq_lens: [R] int32, this step's tokens included.
        ring: [R] int32: ring slot of each request, -1 for none.
        window: Queries in a slot.
        max_query_len: Most tokens of any request of the batch; 1 for decode.

    Raises:
        RuntimeError: A shape, dtype, stride or device is not as above.

    """
    operations(rings).observe(
        rings, query, query_start_loc, seq_lens, ring, window, min(window, max_query_len)
    )

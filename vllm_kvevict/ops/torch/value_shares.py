"""Value shares: the share of each KV head in the norms of a token's values. Reference."""

from collections.abc import Callable

import torch


def value_shares(
    norms: torch.Tensor, sum_of_ranks: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the norm of a token's value in each head over the sum of its norms in all heads.

    Args:
        norms: [L, H, N] float32 Euclidean norms of the values of tokens that all heads hold.
        sum_of_ranks: Sums a tensor over the tensor-parallel ranks, which hold the other heads of
            the layers.

    Returns:
        [L, H, N] float32 in [0, 1]; 0 for a token if its values are zero in every head, or if its
        norms are NaN.

    """
    totals = sum_of_ranks(norms.sum(1))[:, None]
    return (norms / totals).nan_to_num(nan=0.0, posinf=0.0)

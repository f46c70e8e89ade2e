"""value shares: how much of a token's values lies in each KV head. Reference."""

from collections.abc import Callable

import torch


def value_shares(
    norms: torch.Tensor, sum_of_ranks: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A head's norm of a token's value over the sum of its norms in all heads of the layer.

    Args:
        norms: [L, H, N] float32: Euclidean norms of the values of tokens that all heads hold.
        sum_of_ranks: Sums a tensor over the tensor-parallel ranks, which hold the other heads of
            the layers.

    Returns:
        [L, H, N] float32 in [0, 1]; 0 for a token whose values are zero in every head, or whose
        norms are no numbers.

    """
    totals = sum_of_ranks(norms.sum(1))[:, None]
    return (norms / totals).nan_to_num(nan=0.0, posinf=0.0)

"""Measured shares of this rank's KV heads, by layer."""

from collections.abc import Mapping, Sequence

import torch

from vllm_kvevict.cache.state import GroupState


def rank_shares(row: Sequence[float], first: int, heads: int, copies: int) -> list[float]:
    """Return the shares of the KV heads of one rank, scaled to mean 1.

    Args:
        row: Shares of all KV heads of the layer.
        first: Index of the rank's first head among all copies.
        heads: KV heads on the rank.
        copies: KV heads on all ranks, copies included.

    """
    each = copies // len(row)
    shares = [row[(first + head) // each] for head in range(heads)]
    return [share * heads / sum(shares) for share in shares]


def by_group(
    shares: Sequence[Sequence[float]],
    depths: Mapping[str, int],
    states: Mapping[int, GroupState],
    first: int,
    ranks: int,
) -> dict[int, torch.Tensor]:
    """Return the shares [L, H] float64 of each group's layers and this rank's heads, by group id.

    Args:
        shares: Shares of every KV head of every layer that evicts, by depth.
        depths: Index of each layer of this rank among all layers that evict.
        states: Device state of every group that evicts, by group id.
        first: Index of the rank's first head in its layer among all copies.
        ranks: Number of tensor-parallel ranks.

    """
    return {
        group_id: torch.tensor(
            [
                rank_shares(shares[depths[name]], first, state.num_heads, ranks * state.num_heads)
                for name in state.layer_names
            ],
            dtype=torch.float64,
            device=state.head_indptr.device,
        )
        for group_id, state in states.items()
    }

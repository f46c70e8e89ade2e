"""Measured shares of this rank's KV heads, layer by layer."""

from collections.abc import Mapping, Sequence

import torch

from vllm_kvevict.cache.state import GroupState


def rank_shares(row: Sequence[float], first: int, heads: int, copies: int) -> list[float]:
    """Shares of the KV heads of one rank, of mean 1.

    Args:
        row: Shares of all KV heads of the layer.
        first: Number of the rank's first head, copies counted.
        heads: KV heads on the rank.
        copies: KV heads on all ranks, copies counted.

    """
    each = copies // len(row)
    mine = [row[(first + head) // each] for head in range(heads)]
    return [share * heads / sum(mine) for share in mine]


def by_group(
    shares: Sequence[Sequence[float]],
    depths: Mapping[str, int],
    states: Mapping[int, GroupState],
    first: int,
    ranks: int,
) -> dict[int, torch.Tensor]:
    """[L, H] float64 shares of each group's layers and this rank's heads.

    Args:
        shares: Of every layer that evicts, by depth, and every KV head of it.
        depths: Place of each layer of this rank among all that evict.
        states: Device state of every group that evicts, by group id.
        first: Number of the rank's first head in its layer, copies counted.
        ranks: Tensor-parallel ranks.

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

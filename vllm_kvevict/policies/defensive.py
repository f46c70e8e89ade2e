"""Defensive: the most that any query attends to a token, and the head's share of its values."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.torch.defensive import window_peaks
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer


@dataclass(frozen=True)
class Defensive(Scorer):
    """Highest attention in the window, times the head's share of the token's value norms.

    Feng et al., DefensiveKV (arXiv:2510.13334): a token is worth what it is worth to the one
    query of the window that needs it most, and never less than the mean of its head. Values
    count as in CriticalKV (arXiv:2502.03805), from which this departs: the norm is that of the
    value itself, not of its product with the output projection, and is taken as a share of the
    norms that the token has in all heads of the layer; one stage, where theirs has two.

    The share of a token of the store is the one it had when all heads still held it.

    Args:
        kernel: Neighbours along the sequence over which each query's weights are averaged.
        reach: Neighbours whose highest average a token has. Theirs has none.

    """

    requirements: ClassVar[Requirements] = Requirements(value_shares=True, floats_per_token=1)

    kernel: int = 5
    reach: int = 17

    def scores(self, candidates: Candidates) -> torch.Tensor:
        """As :meth:`Scorer.scores`.

        Raises:
            ValueError: The candidates carry no queries of the window, or no shares.

        """
        if candidates.value_shares is None:
            raise ValueError("defensive needs the heads' shares of the value norms")
        columns = candidates.num_candidates
        peaks = window_peaks(candidates, self.kernel, self.reach)[:, :columns]
        scores = peaks * candidates.value_shares[:, :columns]
        return scores.masked_fill(~candidates.valid[:, :columns], float("-inf"))


def build(config: EvictionConfig) -> Scorer:
    """Scorer of the policies ``defensive`` and ``ada-defensive``."""
    return Defensive()

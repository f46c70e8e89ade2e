"""Defensive: the highest attention of any query to a token, times the head's value share."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.ops.torch.defensive import AFTER, BEFORE, window_peaks
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer


@dataclass(frozen=True)
class Defensive(Scorer):
    """Highest attention in the window, times the head's share of the token's value norms.

    DefensiveKV (Feng et al., arXiv:2510.13334): the score of a token is the highest attention that
    any query of the window gives it, and at least the mean of its head. Value norms are used as in
    CriticalKV (arXiv:2502.03805), with these differences: the norm is that of the value itself, not
    of its product with the output projection; it is divided by the sum of the token's norms in all
    heads of the layer; and there is one stage instead of two.

    The share of a token of the store is the one it had when all heads still held the token.

    Args:
        kernel: Neighbours along the sequence over which each query's weights are averaged.
        before: Tokens before a peak of these averages that have its score. DefensiveKV has none.
        after: Tokens after a peak that have its score. DefensiveKV has none.

    """

    requirements: ClassVar[Requirements] = Requirements(
        value_shares=True, floats_per_token=1, heads_alone=True
    )

    kernel: int = 5
    before: int = BEFORE
    after: int = AFTER

    def scores(self, candidates: Candidates) -> torch.Tensor:
        """As :meth:`Scorer.scores`.

        Raises:
            ValueError: The candidates have no queries of the window, or no value shares.

        """
        if candidates.value_shares is None:
            raise ValueError("defensive needs the heads' shares of the value norms")
        columns = candidates.num_candidates
        peaks = window_peaks(candidates, self.kernel, self.before, self.after)[:, :columns]
        scores = peaks * candidates.value_shares[:, :columns]
        return scores.masked_fill(~candidates.valid[:, :columns], float("-inf"))


def build(config: EvictionConfig) -> Scorer:
    """Return the scorer of the policies ``defensive`` and ``ada-defensive``."""
    return Defensive()

"""Scissorhands: the number of queries with attention to a token below the mean."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm_kvevict.ops.torch.score import window_weights
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig


@dataclass(frozen=True)
class Scissorhands(Scorer):
    """Tokens with the fewest low weights in the history window are kept.

    Scissorhands (arXiv:2305.17118), NACL section 6.1. The history window is the observation
    window, which is also the recent window. A weight is low if it is below ``1 / t``, with t the
    number of tokens that its query attends to. Low weights are counted over the query heads of a
    KV head. The paper does not define the order of equal counts, and most tokens of a long prompt
    always have low weights; tokens with equal counts are ordered by the sum of their weights.
    """

    requirements: ClassVar[Requirements] = Requirements(heads_alone=True)

    def scores(self, candidates: Candidates) -> torch.Tensor:
        window, columns = candidates.window, candidates.num_candidates
        valid = candidates.valid
        assert candidates.queries is not None
        group = candidates.queries.shape[1]
        seen = valid.cumsum(-1)[:, valid.shape[1] - window :].repeat(1, group)[..., None]
        # Weights that are not low are counted, the complement of the paper's counter. The mean
        # weight of a token with at least one low weight is below 1, so counts decide first.
        high = torch.zeros(len(valid), columns, device=valid.device)
        sums = torch.zeros_like(high)
        for heads, rows, weights in window_weights(candidates):
            weights = weights[..., :columns]
            sums[heads] += weights.sum(1)
            high[heads] += (weights * seen[heads, rows] >= 1).sum(1)
        scores = high + sums / (group * window)
        return scores.masked_fill(~valid[:, :columns], float("-inf"))


def build(config: "EvictionConfig") -> Scorer:
    """Return the scorer of the policy ``scissorhands``."""
    return Scissorhands()

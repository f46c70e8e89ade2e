"""Scissorhands: the number of queries with attention to a token below the mean."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_kvevict.ops.torch.score import head_attention
from vllm_kvevict.policies.base import Candidates, Scorer

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

    def scores(self, candidates: Candidates) -> torch.Tensor:
        window, columns = candidates.window, candidates.num_candidates
        valid = candidates.valid
        total = valid.shape[1]
        seen = valid.cumsum(-1)[:, total - window :, None]
        rows = []
        for head in range(candidates.num_heads):
            weights = head_attention(candidates, head, window)[..., :columns]
            # Weights that are not low are counted, the complement of the paper's counter. The mean
            # weight of a token with at least one low weight is below 1, so counts decide first.
            high = (weights * seen[head] >= 1).sum((0, 1))
            rows.append(high + weights.mean((0, 1)))
        return torch.stack(rows).masked_fill(~valid[:, :columns], float("-inf"))


def build(config: "EvictionConfig") -> Scorer:
    """Return the scorer of the policy ``scissorhands``."""
    return Scissorhands()

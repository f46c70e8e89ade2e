"""Scissorhands: how often attention on a token fell under the mean."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_kvevict.ops.torch.score import head_attention
from vllm_kvevict.policies.base import Candidates, Scorer

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig


@dataclass(frozen=True)
class Scissorhands(Scorer):
    """Tokens with the fewest low scores in the history window are kept.

    Scissorhands (arXiv:2305.17118), NACL section 6.1. The history window is the observation
    window, which is the recent window as well. A weight is low when it is under ``1 / t`` of
    the t tokens that its query sees. Low scores are counted over the query heads of a KV head.
    The paper leaves equal counts open, and of a long prompt most tokens are always low: among
    them the sum of weights decides.
    """

    def scores(self, candidates: Candidates) -> torch.Tensor:
        window, columns = candidates.window, candidates.num_candidates
        valid = candidates.valid
        total = valid.shape[1]
        seen = valid.cumsum(-1)[:, total - window :, None]
        rows = []
        for head in range(candidates.num_heads):
            weights = head_attention(candidates, head, window)[..., :columns]
            # Not low, counted: the complement of the paper's counter. The mean weight of a token
            # that is low even once is too far below 1 to reach the next count.
            high = (weights * seen[head] >= 1).sum((0, 1))
            rows.append(high + weights.mean((0, 1)))
        return torch.stack(rows).masked_fill(~valid[:, :columns], float("-inf"))


def build(config: "EvictionConfig") -> Scorer:
    """Scorer of the policy ``scissorhands``."""
    return Scissorhands()

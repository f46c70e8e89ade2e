"""H2O: heavy hitters by the attention of all queries, and recent tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm_kvevict.policies.base import Candidates, Requirements, Scorer

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig

RECENT = 2.0**40
"""Score of the oldest recent token: above every sum of weights, below every protected token."""

STEP = 2.0**17
"""Distance between consecutive float32 numbers from :data:`RECENT` on."""

EXACT = 2**23
"""Maximum number of recent tokens that have distinct scores."""


@dataclass(frozen=True)
class H2O(Scorer):
    """H2O (arXiv:2306.14048), Algorithm 1 with the accumulation of Algorithm 2 (Remark D.15).

    The score of a token is the sum of its softmax weights over all queries so far, in prefill and
    in decode, averaged over the query heads of its KV head. Section 5.1 of the paper gives half of
    the budget to these heavy hitters and half to the most recent tokens. The observation window
    and the tokens that fill its first block count as recent. A token that is no longer recent
    competes by its sum. If protected tokens leave no room for all recent tokens, the younger ones
    are kept.

    Args:
        recent_share: Share of the budget, in [0, 1], for recent tokens.

    """

    requirements: ClassVar[Requirements] = Requirements(
        window="none",
        keys=False,
        every_query=True,
        floats_per_token=1,
        attention="vllm_kvevict.attention.extensions.query_sums:QuerySums",
    )

    recent_share: float = 0.5

    def scores(self, candidates: Candidates) -> torch.Tensor:
        """As :meth:`Scorer.scores`.

        Raises:
            ValueError: The candidates have no accumulated attention, or there are more recent
                tokens than float32 can represent as distinct scores.

        """
        if candidates.accumulated is None:
            raise ValueError("h2o needs the attention of all queries")
        columns = candidates.num_candidates
        budget = candidates.keep + candidates.window
        after = candidates.valid.shape[1] - columns
        recent = min(max(0, round(self.recent_share * budget) - after), columns)
        if recent > EXACT:
            raise ValueError(f"h2o keeps at most {EXACT} recent tokens, not {recent}")
        scores = candidates.accumulated[:, :columns].clone()
        rank = torch.arange(recent, dtype=scores.dtype, device=scores.device)
        scores[:, columns - recent :] = RECENT + STEP * rank
        return scores.masked_fill(~candidates.valid[:, :columns], float("-inf"))


def build(config: "EvictionConfig") -> Scorer:
    """Return the scorer of the policies ``h2o`` and ``ada-h2o``."""
    return H2O(config.options.recent_share)

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
"""Distance of two float32 numbers from :data:`RECENT` on."""

EXACT = 2**23
"""Recent tokens up to here have different scores."""


@dataclass(frozen=True)
class H2O(Scorer):
    """H2O (arXiv:2306.14048), Algorithm 1 with the accumulation of Algorithm 2 (Remark D.15).

    A token's score is the sum of the softmax weights that it got from all queries so far, in
    prefill and in decode, averaged over the query heads of its KV head. Of the budget, section
    5.1 gives half to these heavy hitters and half to the most recent tokens. The observation
    window and what fills its first block are the most recent of them. A token that left the
    recent ones competes by its sum. A younger recent token comes before an older one where
    protected tokens leave no room for all.

    Args:
        recent_share: Share of the budget, in [0, 1], for recent tokens.

    """

    requirements: ClassVar[Requirements] = Requirements(
        window="none",
        keys=False,
        every_query=True,
        floats_per_token=1,
        attention="vllm_kvevict.papers.accumulation:QuerySums",
    )

    recent_share: float = 0.5

    def scores(self, candidates: Candidates) -> torch.Tensor:
        """As :meth:`Scorer.scores`.

        Raises:
            ValueError: Nothing was accumulated, or there are more recent tokens than float32
                can tell apart.

        """
        if candidates.accumulated is None:
            raise ValueError("h2o needs the attention of all queries")
        columns = candidates.num_candidates
        budget = candidates.keep + candidates.window
        behind = candidates.valid.shape[1] - columns
        recent = min(max(0, round(self.recent_share * budget) - behind), columns)
        if recent > EXACT:
            raise ValueError(f"h2o keeps at most {EXACT} recent tokens, not {recent}")
        scores = candidates.accumulated[:, :columns].clone()
        rank = torch.arange(recent, dtype=scores.dtype, device=scores.device)
        scores[:, columns - recent :] = RECENT + STEP * rank
        return scores.masked_fill(~candidates.valid[:, :columns], float("-inf"))


def build(config: "EvictionConfig") -> Scorer:
    """Scorer of the policies ``h2o`` and ``ada-h2o``."""
    return H2O(config.options.recent_share)

"""TOVA: attention of the last query."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch

from vllm_kvevict.ops.torch.score import head_attention
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig


@dataclass(frozen=True)
class TOVA(Scorer):
    """Attention of the last query to each token, averaged over query heads.

    TOVA or MSRNN (arXiv:2401.06104). NACL section 5.1 describes it as using the current token as
    the only proxy token. All heads of a layer, on all ranks, have the same scores and keep the same
    tokens at every eviction, so a column is the same token in each of them.

    Args:
        heads: "layer" averages over all query heads of the layer, as the paper and kvpress do;
            "group" averages over the query heads of a KV head, for heads that keep different
            tokens.

    """

    requirements: ClassVar[Requirements] = Requirements(crosses_ranks=True)

    heads: Literal["layer", "group"] = "layer"

    def scores(self, candidates: Candidates) -> torch.Tensor:
        columns = candidates.num_candidates
        groups = [
            head_attention(candidates, head, 1)[:, 0, :columns].mean(0)
            for head in range(candidates.num_heads)
        ]
        scores = torch.stack(groups)
        if self.heads == "layer":
            scores = candidates.mean_of_ranks(scores.mean(0)).expand_as(scores)
        return scores.masked_fill(~candidates.valid[:, :columns], float("-inf"))

    def per_head(self) -> Self:
        return replace(self, heads="group")


def build(config: "EvictionConfig") -> Scorer:
    """Return the scorer of the policies ``tova`` and ``ada-tova``."""
    return TOVA()

"""TOVA: attention of the last query alone."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch

from vllm_kvevict.ops.torch.score import head_attention
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig


@dataclass(frozen=True)
class TOVA(Scorer):
    """Attention that the last query gives each token, averaged over query heads.

    TOVA or MSRNN (arXiv:2401.06104); NACL section 5.1 has it as proxy tokens that are only the
    current token. All heads of a layer score alike, also those of other ranks, and so keep the
    same tokens at every eviction, which makes a column the same token in each of them.

    Args:
        heads: "layer" averages over all query heads of the layer, as the paper and kvpress do;
            "group" over those of a KV head, for heads that keep different tokens.

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
    """Scorer of the policy ``tova``."""
    return TOVA()

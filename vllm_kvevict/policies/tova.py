"""TOVA: attention of the last query."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch

from vllm_kvevict.ops.torch.score import last_query_attention
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

    requirements: ClassVar[Requirements] = Requirements(crosses_ranks=True, layers_alone=True)

    heads: Literal["layer", "group"] = "layer"

    def scores(self, candidates: Candidates) -> torch.Tensor:
        columns = candidates.num_candidates
        scores = last_query_attention(candidates)[..., :columns].mean(1)
        if self.heads == "layer":
            by_layer = scores.unflatten(0, (candidates.num_layers, -1))
            layers = candidates.mean_of_ranks(by_layer.mean(1))
            scores = layers[:, None].expand_as(by_layer).flatten(0, 1)
        return scores.masked_fill(~candidates.valid[:, :columns], float("-inf"))

    def per_head(self) -> Self:
        return replace(self, heads="group")


def build(config: "EvictionConfig") -> Scorer:
    """Return the scorer of the policies ``tova`` and ``ada-tova``."""
    return TOVA()

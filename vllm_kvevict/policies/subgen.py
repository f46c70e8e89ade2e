"""The cache of SubGen section 3.2: recent tokens, and centres of the other keys."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm_kvevict.ops.torch.centers import choose_centers
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig


@dataclass(frozen=True)
class SubGen(Scorer):
    """The k tokens of a head that greedy k-center selects by their keys, in the order of selection.

    SubGen (arXiv:2402.06082), section 3.2: "the most recent r token embeddings, in addition to
    k centers selected from the remaining tokens". r is the window and the tokens that fill its
    first block. Keys are compared as cached, with their rotation. The paper does not define the
    first centre; it is the oldest token of the head here. The streaming estimator of Algorithm 1 is
    the policy ``subgen-stream``.
    """

    requirements: ClassVar[Requirements] = Requirements(
        window="none", heads_alone=True, keys_in_place=True
    )

    def scores(self, candidates: Candidates) -> torch.Tensor:
        columns, keep = candidates.num_candidates, candidates.keep
        valid = candidates.valid[:, :columns]
        centers = choose_centers(candidates.keys[:, :columns], valid, keep)
        order = torch.arange(keep, 0, -1, dtype=torch.float32, device=valid.device)
        scores = torch.zeros(valid.shape, dtype=torch.float32, device=valid.device)
        scores.scatter_(-1, centers, order.expand_as(centers))
        return scores.masked_fill(~valid, float("-inf"))

    def warm_up(self, keys: torch.Tensor) -> None:
        valid = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
        choose_centers(keys, valid, 1)


def build(config: "EvictionConfig") -> Scorer:
    """Return the scorer of the policy ``subgen``."""
    return SubGen()

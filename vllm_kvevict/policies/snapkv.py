"""SnapKV: attention of the observation window."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from vllm_kvevict.ops.torch.score import pool, window_attention
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Attention of the observation window, averaged over it and over the GQA group, then pooled.

    SnapKV (arXiv:2404.14469) as in Ada-KV section 3.4. The defaults are those of Ada-KV; kvpress's
    SnapKVPress averages over 5 tokens.

    Args:
        kernel: Width of the pooling in tokens, odd; 1 for none.
        kind: "max" or "avg".

    """

    requirements: ClassVar[Requirements] = Requirements(heads_alone=True)

    kernel: int = 7
    kind: Literal["max", "avg"] = "max"

    def scores(self, candidates: Candidates) -> torch.Tensor:
        attention = window_attention(candidates)
        valid = candidates.valid[:, : attention.shape[1]]
        pooled = pool(attention, valid, self.kernel, self.kind)
        return pooled[:, : candidates.num_candidates]


def build(config: "EvictionConfig") -> Scorer:
    """Return the scorer of the policies ``snapkv``, ``pyramidkv`` and their adaptive forms."""
    return SnapKV(config.options.pool_kernel, config.options.pool)

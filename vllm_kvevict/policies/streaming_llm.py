"""StreamingLLM: the first tokens (attention sinks) and the most recent ones."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm_kvevict.policies.base import Candidates, Requirements, Scorer

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig

EXACT = 2**24
"""Columns up to here are different float32 numbers."""


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """A token's score is its column; sinks score above all others.

    StreamingLLM (arXiv:2309.17453), Ada-KV section 4.1. Sinks are the first cached tokens of
    each head: they survive every eviction and so stay the first. Keys keep their positions.

    Args:
        sinks: First tokens that are kept, part of the budget.

    """

    requirements: ClassVar[Requirements] = Requirements(window="none", keys=False)

    sinks: int = 4

    def scores(self, candidates: Candidates) -> torch.Tensor:
        """As :meth:`Scorer.scores`.

        Raises:
            ValueError: More columns than float32 can tell apart.

        """
        columns = candidates.num_candidates
        if columns > EXACT:
            raise ValueError(f"streaming-llm scores at most {EXACT} tokens, not {columns}")
        valid = candidates.valid[:, :columns]
        recency = torch.arange(columns, dtype=torch.float32, device=valid.device)
        sink = valid.cumsum(-1) <= self.sinks
        scores = recency.masked_fill(sink, float(columns))
        return scores.masked_fill(~valid, float("-inf"))


def build(config: "EvictionConfig") -> Scorer:
    """Scorer of the policy ``streaming-llm``."""
    return StreamingLLM(config.options.sinks)

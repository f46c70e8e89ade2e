"""StreamingLLM: the first tokens (attention sinks) and the most recent ones."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm_kvevict.policies.base import Candidates, Requirements, Scorer

if TYPE_CHECKING:
    from vllm_kvevict.config.config import EvictionConfig

EXACT = 2**24
"""Integers up to this number are distinct in float32."""


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """The score of a token is its column; the scores of sinks are above all others.

    StreamingLLM (arXiv:2309.17453), Ada-KV section 4.1. Sinks are the first cached tokens of each
    head. They survive every eviction and so remain the first. Keys keep their positions.

    Args:
        sinks: Number of first tokens that are kept; they count towards the budget.

    """

    requirements: ClassVar[Requirements] = Requirements(window="none", keys=False, heads_alone=True)

    sinks: int = 4

    def scores(self, candidates: Candidates) -> torch.Tensor:
        """As :meth:`Scorer.scores`.

        Raises:
            ValueError: There are more columns than float32 can represent exactly.

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
    """Return the scorer of the policy ``streaming-llm``."""
    return StreamingLLM(config.options.sinks)

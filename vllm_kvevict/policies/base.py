"""The contract of a policy: scores, and an allocation of whole pages. Pure tensor math.

Shapes are those of :class:`Candidates`: H KV heads, N columns of the candidate grid.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from vllm_kvevict.ops.candidates import Candidates as Candidates

PROTECTED = 1e30
"""Score of a protected token: above every real one, and finite when a page is summed up."""


def protect(scores: torch.Tensor, valid: torch.Tensor, first: int) -> torch.Tensor:
    """Put the first ``first`` cached tokens of every head above all others.

    Survivors keep their order, so the first tokens of the prompt are the first columns at
    every later eviction as well.

    Args:
        scores: [..., N] float32, below :data:`PROTECTED`.
        valid: [..., N or more] bool: False on the padding at the left.
        first: Protected tokens; 0 for none.

    Returns:
        [..., N] float32.

    """
    if not first:
        return scores
    valid = valid[..., : scores.shape[-1]]
    return scores.masked_fill(valid & (valid.cumsum(-1) <= first), PROTECTED)


class Scorer(ABC):
    """How much each cached token matters to each KV head."""

    needs_window: ClassVar[bool] = True

    wants_window: ClassVar[bool] = False
    """Whether the window's queries are read where they were recorded, and done without elsewhere.

    Of a scorer whose ``needs_window`` is False."""

    needs_keys: ClassVar[bool] = True

    random: ClassVar[bool] = False

    crosses_ranks: ClassVar[bool] = False
    """Whether :meth:`scores` calls ``mean_of_ranks``, which no rank can leave alone.

    All heads must then keep the same tokens: measured shares of the heads do not count."""

    accumulates_attention: ClassVar[bool] = False
    """Whether the attention of every query is added up, in channel 0 of the page values."""

    needs_values: ClassVar[bool] = False

    needs_value_shares: ClassVar[bool] = False
    """Whether a kept token's share of the value norms stands in channel 0 of the page values."""

    needs_key_scores: ClassVar[bool] = False
    """Whether what the model's profile says of each token's key stands in the page values, from
    the first eviction on whose candidate the token is; of a learned policy."""

    page_channels: ClassVar[int] = 0
    """float32 numbers beside every cached token of every head; the worker moves them with it."""

    @abstractmethod
    def scores(self, candidates: Candidates) -> torch.Tensor:
        """Score the candidates.

        Returns:
            [H, num_candidates] float32, higher is kept, below :data:`PROTECTED`; -inf where
            ``valid`` is False.

        """

    def per_head(self) -> Self:
        """The scorer beside an adaptive allocator, whose heads keep different tokens.

        A scorer that mixes the heads of a layer overrides it.
        """
        return self


@dataclass(frozen=True)
class Summary:
    """What a :class:`WeightedScorer` makes of one layer's candidates.

    Args:
        scores: [H, num_candidates] float32, as :meth:`Scorer.scores` has them.
        log_weights: [H, num_candidates, 2] float32: what each token counts for in the numerator
            and in the denominator of attention; -inf for no part in it, 0 for itself alone.
        memory: What the next eviction of this layer gets; tokens in it are named by column.

    """

    scores: torch.Tensor
    log_weights: torch.Tensor
    memory: Any


class WeightedScorer(Scorer):
    """A scorer whose kept tokens stand for others, too: attention weighs those it has evicted.

    Every head keeps the same number of tokens. Log-weights lie in the page values, the
    numerator's in channel 0.
    """

    page_channels: ClassVar[int] = 2

    @property
    @abstractmethod
    def least_slots(self) -> int:
        """Tokens that a head must keep beside protected ones."""

    @abstractmethod
    def summarize(self, candidates: Candidates, memory: Any | None) -> Summary:
        """Score the candidates, and say what each of the best ``keep`` counts for.

        Args:
            candidates: One layer of one request. At a later eviction the first ``keep`` columns
                are what the one before it kept.
            memory: What :meth:`moved` made of the last summary's; None at the first eviction.

        """

    @abstractmethod
    def moved(self, memory: Any, columns: torch.Tensor) -> Any:
        """A summary's memory, with tokens named by their slots in the store.

        Args:
            memory: :attr:`Summary.memory`.
            columns: [H, keep] int64 ascending: the column that went to each slot.

        """

    def scores(self, candidates: Candidates) -> torch.Tensor:
        return self.summarize(candidates, None).scores


class Allocator(ABC):
    """How many whole pages each KV head keeps."""

    follows_shares: ClassVar[bool] = False
    """Whether measured shares of the heads count."""

    @abstractmethod
    def pages(
        self,
        scores: torch.Tensor,
        caps: torch.Tensor,
        store_blocks: int,
        block_size: int,
        shares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Share ``store_blocks * H`` pages between the heads of each layer.

        Args:
            scores: [L, H, N] float32, -inf on padding.
            caps: [L, H] int64: pages of candidates each head has.
            store_blocks: S.
            block_size: Tokens in a page.
            shares: [L, H] float of mean 1 in a layer: measured needs of the heads; None for none.

        Returns:
            [L, H] int64, each row summing to ``S * H``, each entry in [1, cap].

        """


@dataclass(frozen=True)
class Policy:
    """A named pair of scorer and allocator."""

    name: str
    summary: str
    scorer: Scorer
    allocator: Allocator

    @property
    def needs_window(self) -> bool:
        return self.scorer.needs_window

    @property
    def wants_window(self) -> bool:
        return self.scorer.wants_window

    @property
    def accumulates_attention(self) -> bool:
        return self.scorer.accumulates_attention

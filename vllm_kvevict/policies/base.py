"""The contract of a policy: scores, and an allocation of whole pages. Pure tensor math.

Shapes are those of :class:`Candidates`: H KV heads, N columns of the candidate grid.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

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


@dataclass(frozen=True)
class Requirements:
    """What a policy reads in addition to lengths, and what the engine must do for it.

    Args:
        window: "required": no eviction without the queries of the observation window. "optional":
            they are read if they were recorded. "none": they are never read.
        keys: Scores read the keys. They are read with a recorded window in any case.
        values: Scores read the values.
        value_shares: Scores read each head's share of the norms of a token's values. It is
            computed once for each token and kept in the token's first float.
        key_scores: Scores read what the probes of the model's profile say of each key. It is
            computed once for each token and kept in the token's first floats.
        every_query: The attention of every query, in prefill and in decode, is added up in the
            token's first float, which scores read.
        floats_per_token: float32 numbers that are kept for each cached token and KV head, outside
            the KV cache. They move with the token.
        random: Scores draw numbers, from :attr:`Candidates.seed`.
        crosses_ranks: Scores call :attr:`Candidates.mean_of_ranks`, which all ranks must call. All
            heads then keep the same tokens: measured shares of the heads do not count.
        weighs: Kept tokens stand for evicted ones: :meth:`Scorer.kept` returns two log-weights of
            each, for the numerator and the denominator of attention, and they are its floats.
            Every head keeps the same number of tokens.
        attention: Class of the attention extension, as ``module:Class``, that adds up the attention
            of every query or weighs tokens (``attention/extension.py``). Only the CPU backend runs
            extensions. "" names none.

    Raises:
        ValueError: Something is kept for each token, and there are too few floats for it; or an
            extension is named for nothing, or not named.

    """

    window: Literal["required", "optional", "none"] = "required"
    keys: bool = True
    values: bool = False
    value_shares: bool = False
    key_scores: bool = False
    every_query: bool = False
    floats_per_token: int = 0
    random: bool = False
    crosses_ranks: bool = False
    weighs: bool = False
    attention: str = ""

    def __post_init__(self) -> None:
        least = 2 if self.weighs else self.value_shares or self.key_scores or self.every_query
        if self.floats_per_token < least:
            raise ValueError(f"{self} keeps {int(least)} floats of each token at least")
        if bool(self.attention) != (self.every_query or self.weighs):
            raise ValueError(f"{self} names an extension for every_query and for weighs alone")

    @property
    def shares_stores(self) -> bool:
        """True if what an eviction keeps depends on the tokens before it alone, and is final.

        Draws are seeded by the whole prompt, sums of attention go on, and log-weights come with a
        memory of the request.
        """
        return not (self.random or self.every_query or self.weighs)

    @property
    def reads_share(self) -> bool:
        """True if scores depend on the share of the tokens that the budget keeps."""
        return self.key_scores


class Scorer(ABC):
    """How much each cached token matters to each KV head."""

    requirements: ClassVar[Requirements] = Requirements()

    @abstractmethod
    def scores(self, candidates: Candidates) -> torch.Tensor:
        """Score the candidates.

        Returns:
            [H, num_candidates] float32, higher is kept, below :data:`PROTECTED`; -inf where
            ``valid`` is False.

        """

    def per_head(self) -> Self:
        """The scorer with an adaptive allocator, under which heads keep different tokens.

        A scorer that mixes the heads of a layer overrides it.
        """
        return self

    def kept(self, row: int, layer_name: str, columns: torch.Tensor) -> torch.Tensor:
        """Log-weights of the tokens that an eviction keeps, for scorers that weigh.

        Args:
            row: :attr:`Candidates.row` of the last call of :meth:`scores` for this request.
            layer_name: :attr:`Candidates.layer_name` of it.
            columns: [H, keep] int64 ascending: the candidate that went to each slot of the store.

        Returns:
            [H, keep, 2] float32; -inf for no part in the sum, 0 for itself alone.

        """
        raise NotImplementedError

    def forget(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Drop what is remembered of requests: their rows begin anew."""


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
    def requirements(self) -> Requirements:
        return self.scorer.requirements

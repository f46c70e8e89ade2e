"""Interfaces of a policy: a scorer of tokens and an allocator of pages, on tensors alone.

Shapes are those of :class:`Candidates`: H KV heads, N columns of the candidate grid.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch

from vllm_kvevict.ops.candidates import Candidates as Candidates

PROTECTED = 1e30
"""Score of a protected token: above all other scores, with a finite sum over a page."""


def protect(scores: torch.Tensor, valid: torch.Tensor, first: int) -> torch.Tensor:
    """Return the scores, with those of the first cached tokens of every head above all others.

    Survivors keep their order, so the first tokens of the prompt are the first columns at
    every later eviction as well.

    Args:
        scores: [..., N] float32, below :data:`PROTECTED`.
        valid: [..., N or more] bool: False on the padding at the left.
        first: Number of protected tokens; 0 for none.

    Returns:
        [..., N] float32.

    """
    if not first:
        return scores
    valid = valid[..., : scores.shape[-1]]
    return scores.masked_fill(valid & (valid.cumsum(-1) <= first), PROTECTED)


@dataclass(frozen=True)
class Requirements:
    """The inputs that a policy requires in addition to lengths.

    Args:
        window: "required": there is no eviction without the queries of the observation window.
            "optional": they are read if they were recorded. "none": they are never read.
        keys: Scores read the keys. Keys are read with a recorded window in any case.
        values: Scores read the values.
        value_shares: Scores read each head's share of the norms of a token's values. The share is
            computed once for each token and kept in the token's first float.
        key_scores: Scores read the scores that the probes of the model's profile give each key.
            They are computed once for each token and kept in the token's first floats.
        every_query: The attention of every query, in prefill and in decode, is accumulated in the
            token's first float, which scores read.
        floats_per_token: float32 numbers that are kept for each cached token and KV head, outside
            the KV cache. They move with the token.
        random: Scores draw random numbers, seeded by :attr:`Candidates.seed`.
        keeps_state: Scores depend on a state that the scorer keeps for a request between its
            evictions, under :attr:`Candidates.row` and :attr:`Candidates.layer_name`. The scorer
            gets one layer at a time, and its requests share no stores: a request that reuses a
            store would begin without the state of the evictions that made the store.
        crosses_ranks: Scores call :attr:`Candidates.mean_of_ranks`, which all ranks must call. All
            heads then keep the same tokens, so measured shares of the heads are not used.
        weighs: Kept tokens represent evicted ones: :meth:`Scorer.kept` returns two log-weights of
            each, for the numerator and the denominator of attention, which are its floats.
            Every head keeps the same number of tokens.
        heads_alone: Scores of a head depend on the inputs of that head alone, and not on
            ``num_heads``, ``seed``, ``layer``, ``layer_name`` and ``first_head``. On a GPU the
            scorer may then get the heads of several layers at once.
        layers_alone: Scores of a layer depend on the inputs of that layer alone, and not on
            ``layer`` and ``layer_name``. On a GPU the scorer may then get all heads of several
            layers at once, which :attr:`Candidates.layers` numbers.
        keys_in_place: Scores make no intermediate result of the size of the keys. On a GPU the
            scorer then gets more heads at once in the same memory.
        attention: Class of the attention extension, as ``module:Class``, that accumulates the
            attention of every query or weighs tokens (``attention/extensions/base.py``). A GPU
            runs extensions with a method for it. "" names none.

    Raises:
        ValueError: ``floats_per_token`` is below the number of floats that are kept for each
            token, or an extension is named although none is needed, or the reverse, or a policy
            that keeps a state gets several layers at once.

    """

    window: Literal["required", "optional", "none"] = "required"
    keys: bool = True
    values: bool = False
    value_shares: bool = False
    key_scores: bool = False
    every_query: bool = False
    floats_per_token: int = 0
    random: bool = False
    keeps_state: bool = False
    crosses_ranks: bool = False
    weighs: bool = False
    heads_alone: bool = False
    layers_alone: bool = False
    keys_in_place: bool = False
    attention: str = ""

    def __post_init__(self) -> None:
        kept = 2 if self.weighs else self.value_shares or self.key_scores or self.every_query
        if self.floats_per_token < kept:
            raise ValueError(f"{self} needs floats_per_token of at least {int(kept)}")
        if bool(self.attention) != (self.every_query or self.weighs):
            raise ValueError(f"{self} must name an attention extension for every_query or weighs")
        if self.keeps_state and (self.heads_alone or self.layers_alone):
            raise ValueError(f"{self} cannot combine keeps_state with heads_alone or layers_alone")

    @property
    def shares_stores(self) -> bool:
        """True if the result of an eviction is final and depends only on the tokens before it.

        Draws are seeded by the entire prompt, sums of attention continue to grow, and a state does
        not travel with a store.
        """
        return not (self.random or self.every_query or self.keeps_state)

    @property
    def reads_share(self) -> bool:
        """True if scores depend on the share of the tokens that the budget keeps."""
        return self.key_scores


class Scorer(ABC):
    """Scores the importance of each cached token to each KV head."""

    requirements: ClassVar[Requirements] = Requirements()

    @abstractmethod
    def scores(self, candidates: Candidates) -> torch.Tensor:
        """Score the candidates.

        Returns:
            [H, num_candidates] float32, below :data:`PROTECTED`, -inf if ``valid`` is False. Higher
            scores are kept.

        """

    def per_head(self) -> Self:
        """Return the scorer for an adaptive allocator, under which heads keep different tokens.

        A scorer that combines the heads of a layer overrides it.
        """
        return self

    def kept(self, row: int, layer_name: str, columns: torch.Tensor) -> torch.Tensor:
        """Return the log-weights of the tokens that an eviction keeps, for scorers that weigh.

        Args:
            row: :attr:`Candidates.row` of the last call of :meth:`scores` for this request.
            layer_name: :attr:`Candidates.layer_name` of that call.
            columns: [H, keep] int64, ascending: the candidate that moved to each slot of the store.

        Returns:
            [H, keep, 2] float32; -inf excludes a token from the sum, 0 counts it once.

        """
        raise NotImplementedError

    def warm_up(self, keys: torch.Tensor) -> None:  # noqa: B027
        """Compile and load on a GPU what :meth:`scores` runs there, before there is a request.

        Args:
            keys: [1, N, D] keys of the dtype and device of :attr:`Candidates.keys`.

        """

    def clear_rows(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Drop the state of the requests of these rows, for scorers that keep a state.

        A row is forgotten when its request ends or is preempted, and at the latest before another
        request gets it.
        """


class Allocator(ABC):
    """Chooses the number of pages that each KV head keeps."""

    follows_shares: ClassVar[bool] = False
    """True if the allocation uses measured shares of the heads."""

    @abstractmethod
    def pages(
        self,
        scores: torch.Tensor,
        caps: torch.Tensor,
        store_blocks: int,
        block_size: int,
        shares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Divide ``store_blocks * H`` pages between the heads of each layer.

        Args:
            scores: [L, H, N] float32, -inf on padding.
            caps: [L, H] int64 candidate pages of each head.
            store_blocks: S.
            block_size: Tokens in a page.
            shares: [L, H] float measured shares of the heads, of mean 1 in a layer; None for none.

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

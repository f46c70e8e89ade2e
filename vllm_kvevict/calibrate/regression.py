"""Features of a cached token, the targets that a probe learns, and ridge regression."""

from collections.abc import Callable

import torch

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.torch.defensive import AFTER, BEFORE, window_peaks
from vllm_kvevict.ops.torch.probe import with_prose
from vllm_kvevict.ops.torch.value_shares import value_shares

LEAST = 1e-6
"""Smallest argument of a logarithm."""

KERNEL = 5
"""Neighbours over which attention is averaged, as in ``defensive``.

Targets without the average are better for texts in which everything is asked, but lose single
facts in models with few KV heads: Gemma 3 270M at an eighth of the cache.
"""

Sum = Callable[[torch.Tensor], torch.Tensor]


def shares_of(values: torch.Tensor, sum_of_ranks: Sum) -> torch.Tensor:
    """[H, N] share of each head in the norms of the values [H, N, D]."""
    return value_shares(values.float().norm(dim=-1)[None], sum_of_ranks)[0]


def target(most: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the target of a probe: the logarithm of what a token will be worth.

    Args:
        most: [H, N] the highest attention that a later query gave each token, averaged over
            :data:`KERNEL` neighbours first.
        shares: [H, N] the head's share of the norms of the token's values.

    Returns:
        [H, N] float32.

    """
    return (most * shares).add(LEAST).log()


def following(single: torch.Tensor) -> torch.Tensor:
    """Return the target for a text that continues: a token is worth the attention that it receives.

    Whoever answers a question says a fact to its end, and needs the neighbours of what it looks at;
    who goes on with prose does not, and each neighbour takes the place of another token.

    Args:
        single: [H, n] the highest attention that a query of what follows gave each token.

    Returns:
        [H, n] float32.

    """
    return single.add(LEAST).log()


def window_feature(
    keys: torch.Tensor,
    queries: torch.Tensor,
    shares: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[H, n] the logarithm of ``defensive``'s score, as the policy joins it.

    Args:
        keys: [H, n + recent, D] rotated: of all tokens.
        queries: [H, G, w, D] float32: of the last w tokens.
        shares: [H, n] of the values' norms.
        scale: Softmax scale.
        softcap: Logit soft cap, 0 for none.
        sinks: [H, G] float32 attention sinks, None for none.

    """
    window, columns = queries.shape[2], shares.shape[1]
    valid = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
    candidates = Candidates(keys, valid, queries, window, columns, scale, softcap, sinks=sinks)
    peaks = window_peaks(candidates, KERNEL, BEFORE, AFTER)[:, :columns]
    return peaks.clamp(min=LEAST).log() + shares.clamp(min=LEAST).log()


def scored(x: torch.Tensor, seen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[H, n] scores as the policy makes them.

    Args:
        x: [H, n, D + 4] of :func:`features`.
        seen: [H, n] of :func:`window_feature`.
        weights: [2, H, D + 4] of what answers taught and of what follows, or [2, H, D + 5] with the
            window.

    """
    size, of_keys = x.shape[-1], x.shape[-1] + 2 - REST
    # All heads know the same ages.
    ages = x[0, :, of_keys:]
    both = x[..., :of_keys] @ weights[..., :of_keys].permute(1, 2, 0)
    of_ages = weights[1, :, None, of_keys:size]
    said = with_prose(both, ages - ages.mean(0), of_ages)[..., 0]
    return said if weights.shape[-1] == size else said + weights.sum(0)[:, -1:] * seen


def captured(scores: torch.Tensor, worth: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the worth that heads hold if they keep a part of their tokens, the best by score.

    Args:
        scores: [H, n].
        worth: [H, n], at least 0.
        steps: Parts: 1 / steps of the tokens, 2 / steps, ... all.

    Returns:
        [H, steps] float64 sums.

    """
    order = scores.argsort(dim=-1, descending=True)
    sums = worth.double().gather(-1, order).cumsum(-1)
    count = scores.shape[-1]
    at = (torch.arange(1, steps + 1, device=scores.device) * count / steps).long() - 1
    return sums[:, at.clamp(min=0)]


REST = 4
"""Features of a token without the dimensions of its key."""


def features(keys: torch.Tensor, end: int) -> torch.Tensor:
    """Return the features of tokens that need no window.

    Args:
        keys: [H, n, D] unrotated.
        end: Tokens of the context, of which these are the first.

    Returns:
        [H, n, D + 4] float32: keys, their norms, 1, the logarithm of the token's age (tokens from
        it to the context's end), its square.

    """
    norms = keys.norm(dim=-1, keepdim=True)
    ages = torch.arange(end, end - keys.shape[1], -1, device=keys.device).float().log()
    ages = ages[None, :, None].expand(norms.shape)
    return torch.cat([keys, norms, torch.ones_like(norms), ages, ages.square()], dim=-1)


class Ridge:
    """Sums of products over prompts, from which the probe of each head follows.

    Args:
        heads: H.
        size: Features of a token.
        device: Where the sums are.

    """

    def __init__(self, heads: int, size: int, device: torch.device) -> None:
        self.tokens = 0
        self._xx = torch.zeros(heads, size, size, dtype=torch.float64, device=device)
        self._xy = torch.zeros(heads, size, dtype=torch.float64, device=device)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Count tokens: features [H, n, size] and what the probe should say [H, n]."""
        # In float32 a sum over the features of ages is too coarse for the weights of the others.
        x = x.double()
        self._xx += x.mT @ x
        self._xy += (x.mT @ y.double()[..., None])[..., 0]
        self.tokens += x.shape[1]

    def solve(self, strength: float, size: int | None = None) -> torch.Tensor:
        """Weights [H, size] float32.

        Args:
            strength: Penalty on a weight's square, for each token counted.
            size: Of the first features, which alone are used; None for all.

        """
        xx, xy = self._xx[:, :size, :size], self._xy[:, :size]
        penalty = strength * self.tokens * torch.eye(xx.shape[-1], dtype=torch.float64)
        return torch.linalg.solve(xx + penalty.to(xx.device), xy[..., None])[..., 0].float()

    def moments(self, weights: torch.Tensor, one: int) -> torch.Tensor:
        """[H, 3] float64: mean and mean square of what weights say of the tokens counted, and the
        mean of what they say by features up to ``one``.

        Args:
            weights: [H, size or less] of the first features.
            one: Index of the feature that is 1.

        """
        size = weights.shape[-1]
        w, xx = weights.double(), self._xx[:, :size, :size] / self.tokens
        means = xx[:, one] * w
        square = torch.einsum("hi,hij,hj->h", w, xx, w)
        return torch.stack([means.sum(-1), square, means[:, : one + 1].sum(-1)], -1)


def spread_as(second: torch.Tensor, moments: torch.Tensor, one: int) -> torch.Tensor:
    """A second probe with the spread that the first one's scores have in a layer.

    What it says of keys is 0 on the layer's average.

    Args:
        second: [L, H, size] weights.
        moments: [L, H, 2, 3] of :meth:`Ridge.moments`, of the first and of the second.
        one: Index of the feature that is 1, after those of keys.

    """
    mean, square, of_keys = moments.double().mean(1).unbind(-1)
    second = second.clone()
    second[..., one] -= of_keys[:, 1, None]
    spread = (square - mean**2).clamp(min=1e-12).sqrt()
    return (spread[:, 0] / spread[:, 1]).float()[:, None, None] * second

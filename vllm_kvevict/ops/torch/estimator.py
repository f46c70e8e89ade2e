"""Estimator of attention over a stream of tokens from weighted samples of it. Reference."""

from dataclasses import dataclass, replace

import torch

from vllm_kvevict.ops.torch.clusters import Clusters
from vllm_kvevict.ops.torch.sample import digest

PAGE = 32
"""Number of consecutive tokens with draws from one generator."""

COINS, TOSSES = 0, 1


@dataclass
class Estimator:
    """State of SubGen (arXiv:2402.06082) Algorithm 1 for one KV head.

    Tokens are identified by their column in the keys and values of each call; after columns moved,
    :meth:`moved` renumbers them. Draws depend on the token's index in the stream, so a stream that
    is added in pieces has the same result as one that is added at once.

    Args:
        clusters: D, for the denominator: samples of every cluster of keys.
        values: [s] int64: M, for the numerator: tokens drawn by squared value norm, -1 for none.
        seed: Numbers that seed the draws of this stream.
        mass: mu, the sum of squared value norms.
        length: Number of tokens so far.

    """

    clusters: Clusters
    values: torch.Tensor
    seed: tuple[int, ...] = ()
    mass: float = 0.0
    length: int = 0

    @classmethod
    def empty(
        cls, radius: float, per_cluster: int, by_value: int, seed: tuple[int, ...]
    ) -> "Estimator":
        """Return the state before the first token.

        Args:
            radius: delta of the clusters.
            per_cluster: t, samples of each cluster.
            by_value: s, samples by value norm.
            seed: Numbers in [-2**63, 2**63).

        """
        values = torch.full((by_value,), -1, dtype=torch.int64)
        return cls(Clusters.empty(radius, per_cluster), values, seed)

    def add(
        self, points: torch.Tensor, norms: torch.Tensor, begin: int, count: int, max_clusters: int
    ) -> None:
        """Stream the tokens of ``count`` columns, lines 4 to 6.

        Args:
            points: [n, D] float64: :func:`finite` keys of all columns.
            norms: [n] float64: :func:`squared_norms` of their values.
            begin: First column to add.
            count: Number of columns to add.
            max_clusters: Maximum number of clusters, at least 1.

        """
        end = begin + count
        while begin < end:
            skip = self.length % PAGE
            step = min(PAGE - skip, end - begin)
            coins = self._coins(COINS, self.length // PAGE, PAGE)[skip : skip + step]
            drawn = len(self.values)
            self.clusters.add(points, begin, coins[:, drawn:], max_clusters, self._toss)
            self._draw(norms[begin : begin + step], coins[:, :drawn], begin)
            self.length += step
            begin += step

    def _draw(self, norms: torch.Tensor, coins: torch.Tensor, begin: int) -> None:
        """Lines 25 to 27: a token replaces every sample with probability norm / (mass + norm)."""
        mass = torch.cat([norms.new_tensor([self.mass]), norms]).cumsum(0)[1:]
        chance = torch.where(norms > 0, norms / mass, 0.0)
        column = torch.arange(begin, begin + len(norms))[:, None]
        last = torch.where(coins < chance[:, None], column, -1).amax(0)
        self.values = torch.where(last >= 0, last, self.values)
        self.mass = float(mass[-1])

    def _coins(self, kind: int, number: int, rows: int) -> torch.Tensor:
        """Return draws [rows, s + t] float64 in [0, 1), which the arguments determine."""
        generator = torch.Generator().manual_seed(digest((*self.seed, kind, number)))
        width = len(self.values) + self.clusters.samples.shape[1]
        return torch.rand(rows, width, dtype=torch.float64, generator=generator)

    def _toss(self, merge: int) -> torch.Tensor:
        return self._coins(TOSSES, merge, 1)[0, len(self.values) :]

    @property
    def columns(self) -> torch.Tensor:
        """[u] int64 columns that must stay in the cache: samples and representatives, ascending."""
        clusters = self.clusters
        held = [self.values[self.values >= 0], clusters.centers, clusters.samples.flatten()]
        return torch.cat(held).unique()

    def log_weights(self, norms: torch.Tensor) -> torch.Tensor:
        """Lines 29 and 30: return the log-weights of each column.

        Args:
            norms: [n] float64: :func:`squared_norms` of the values of all columns.

        Returns:
            [n, 2] float32: log-weight in the numerator, ``mu / (s |v|^2)`` for each time that the
            column was drawn, and in the denominator, ``n_i / t`` for each; -inf for weight 0.

        """
        weights = torch.zeros(len(norms), 2, dtype=torch.float64)
        drawn = self.values[self.values >= 0]
        each = self.mass / len(self.values) / norms[drawn]
        weights[:, 0].index_add_(0, drawn, each)
        samples = self.clusters.samples
        each = (self.clusters.counts.double() / samples.shape[1])[:, None].expand(samples.shape)
        weights[:, 1].index_add_(0, samples.flatten(), each.flatten())
        return weights.log().float()

    def moved(self, columns: torch.Tensor) -> "Estimator":
        """Return the state with renumbered tokens.

        Args:
            columns: [K] int64, ascending: the old column of each new one. It includes
                :attr:`columns`.

        """

        def rename(old: torch.Tensor) -> torch.Tensor:
            return torch.where(old >= 0, torch.searchsorted(columns, old), old)

        clusters = replace(
            self.clusters,
            centers=rename(self.clusters.centers),
            samples=rename(self.clusters.samples),
        )
        return replace(self, clusters=clusters, values=rename(self.values))


def finite(keys: torch.Tensor) -> torch.Tensor:
    """Return keys [..., n, D] as float64, with 0 for elements that are not finite."""
    return keys.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def squared_norms(values: torch.Tensor) -> torch.Tensor:
    """Return squared norms [..., n] float64 of values [..., n, D].

    Tokens with a value that is not finite get 0 and are never drawn.
    """
    return values.double().square().sum(-1).nan_to_num(nan=0.0, posinf=0.0)


def weighted_attention(
    logits: torch.Tensor,
    values: torch.Tensor,
    log_weights: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Lines 29 to 31: return the estimate of attention.

    It equals softmax attention if all log-weights are 0.

    Args:
        logits: [..., q, n] float32 scaled products of queries and keys; -inf for masked keys.
        values: [..., n, D] float32.
        log_weights: [..., n, 2] float32: numerator, denominator. Every query attends to at least
            one token with a denominator log-weight above -inf.
        sinks: [..., q] float32 sink of each query, which counts once in the denominator; None for
            none.

    Returns:
        [..., q, D] float32: ``sum exp(logit + a) v / (exp(sink) + sum exp(logit + b))``.

    """
    above = logits + log_weights[..., None, :, 0]
    below = logits + log_weights[..., None, :, 1]
    if sinks is not None:
        below = torch.cat([below, sinks[..., None]], dim=-1)
    peak = torch.maximum(above.amax(-1, keepdim=True), below.amax(-1, keepdim=True))
    total = (below - peak).exp().sum(-1, keepdim=True)
    return (above - peak).exp() @ values / total

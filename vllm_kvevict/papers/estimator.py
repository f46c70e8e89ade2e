"""estimator: attention over a stream of tokens from weighted samples of it. Reference."""

from dataclasses import dataclass

import torch

from vllm_kvevict.papers.clusters import Clusters
from vllm_kvevict.papers.sample import digest

PAGE = 32
"""Tokens whose coins come from one generator."""

COINS, TOSSES = 0, 1


@dataclass
class Estimator:
    """SubGen (arXiv:2402.06082) Algorithm 1 for one KV head, after some tokens of its stream.

    Tokens are named by column of the keys and values that each call is given; after columns
    moved, :meth:`moved` renames them. Coins belong to the token's number in the stream, so that
    a stream in pieces ends as the whole one does.

    Args:
        clusters: D, for the denominator: samples of every cluster of keys.
        values: [s] int64: M, for the numerator: tokens drawn by squared value norm, -1 for none.
        seed: Numbers that tell this stream's coins from others.
        mass: mu, the sum of squared value norms.
        length: Tokens so far.

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
        """Nothing seen yet.

        Args:
            radius: delta of the clusters.
            per_cluster: t, samples of each cluster.
            by_value: s, samples by value norm.
            seed: Numbers in [-2**63, 2**63).

        """
        values = torch.full((by_value,), -1, dtype=torch.int64)
        return cls(Clusters.empty(radius, per_cluster), values, seed)

    def add(
        self, points: torch.Tensor, norms: torch.Tensor, begin: int, count: int, most: int
    ) -> None:
        """Stream the tokens of ``count`` columns, lines 4 to 6.

        Args:
            points: [n, D] float64: :func:`finite` keys of all columns.
            norms: [n] float64: :func:`squared_norms` of their values.
            begin: The first of the columns.
            count: How many.
            most: Room: clusters at most, at least 1.

        """
        end = begin + count
        while begin < end:
            skip = self.length % PAGE
            step = min(PAGE - skip, end - begin)
            coins = self._coins(COINS, self.length // PAGE, PAGE)[skip : skip + step]
            drawn = len(self.values)
            self.clusters.add(points, begin, coins[:, drawn:], most, self._toss)
            self._draw(norms[begin : begin + step], coins[:, :drawn], begin)
            self.length += step
            begin += step

    def _draw(self, norms: torch.Tensor, coins: torch.Tensor, begin: int) -> None:
        """Lines 25 to 27: a token replaces every sample with chance norm / (mass + norm)."""
        mass = torch.cat([norms.new_tensor([self.mass]), norms]).cumsum(0)[1:]
        chance = torch.where(norms > 0, norms / mass, 0.0)
        column = torch.arange(begin, begin + len(norms))[:, None]
        last = torch.where(coins < chance[:, None], column, -1).amax(0)
        self.values = torch.where(last >= 0, last, self.values)
        self.mass = float(mass[-1])

    def _coins(self, kind: int, number: int, rows: int) -> torch.Tensor:
        """[rows, s + t] float64 in [0, 1), always the same for the same numbers."""
        generator = torch.Generator().manual_seed(digest((*self.seed, kind, number)))
        width = len(self.values) + self.clusters.samples.shape[1]
        return torch.rand(rows, width, dtype=torch.float64, generator=generator)

    def _toss(self, merge: int) -> torch.Tensor:
        return self._coins(TOSSES, merge, 1)[0, len(self.values) :]

    @property
    def columns(self) -> torch.Tensor:
        """[u] int64: what must stay in the cache, samples and representatives, ascending."""
        clusters = self.clusters
        held = [self.values[self.values >= 0], clusters.centers, clusters.samples.flatten()]
        return torch.cat(held).unique()

    def log_weights(self, norms: torch.Tensor) -> torch.Tensor:
        """Lines 29 and 30: what each column counts for.

        Args:
            norms: [n] float64: :func:`squared_norms` of the values of all columns.

        Returns:
            [n, 2] float32: log weight in the numerator, ``mu / (s |v|^2)`` for each time that it
            was drawn, and in the denominator, ``n_i / t`` likewise; -inf for no part in it.

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
        """The same with other names.

        Args:
            columns: [K] int64 ascending: old columns by new ones, :attr:`columns` among them.

        """

        def rename(old: torch.Tensor) -> torch.Tensor:
            return torch.where(old >= 0, torch.searchsorted(columns, old), old)

        mine = self.clusters
        clusters = Clusters(
            mine.radius, rename(mine.centers), mine.counts, rename(mine.samples), mine.merges
        )
        return Estimator(clusters, rename(self.values), self.seed, self.mass, self.length)


def finite(keys: torch.Tensor) -> torch.Tensor:
    """[..., n, D] float64 of keys, with 0 for what is not a finite number."""
    return keys.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def squared_norms(values: torch.Tensor) -> torch.Tensor:
    """[..., n] float64 of values [..., n, D]; 0, never drawn, where one is not a finite number."""
    return values.double().square().sum(-1).nan_to_num(nan=0.0, posinf=0.0)


def weighted_attention(
    logits: torch.Tensor,
    values: torch.Tensor,
    log_weights: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Lines 29 to 31: the estimate of attention.

    Tokens with both weights 0 in logs and a plain softmax give the same.

    Args:
        logits: [..., q, n] float32: scaled products of queries and keys; -inf for unseen ones.
        values: [..., n, D] float32.
        log_weights: [..., n, 2] float32: numerator, denominator. Every query sees a token whose
            denominator weight is above -inf.
        sinks: [..., q] float32: a sink of each query, which counts once in the denominator; None
            for none.

    Returns:
        [..., q, D] float32: ``sum exp(logit + a) v / (exp(sink) + sum exp(logit + b))``.

    """
    above = logits + log_weights[..., None, :, 0]
    below = logits + log_weights[..., None, :, 1]
    if sinks is not None:
        below = torch.cat([below, sinks[..., None]], dim=-1)
    peak = torch.maximum(above.amax(-1, keepdim=True), below.amax(-1, keepdim=True))
    whole = (below - peak).exp().sum(-1, keepdim=True)
    return (above - peak).exp() @ values / whole

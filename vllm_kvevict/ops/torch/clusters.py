"""Clusters of a stream of keys, with uniform samples of each. Reference implementation."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

EXACT = "donot_use_mm_for_euclid_dist"
"""Mode of ``cdist`` in which the distance of equal points is exactly 0."""

GROWTH = 1.1
"""Minimum factor by which the radius grows when there are too many clusters."""


@dataclass
class Clusters:
    """The softmax normaliser's data structure D of one KV head (SubGen Algorithm 1, lines 11-22).

    A key joins the cluster of the nearest representative, or opens a cluster if the distance to it
    is larger than the radius. Tokens are identified by column. Unlike in the paper, the number of
    clusters is bounded: if it would exceed the bound, the radius becomes the larger of
    :data:`GROWTH` times itself and the smallest distance between two representatives, and clusters
    with representatives within that radius are merged. Samples remain uniform and independent of
    each other. A key stays within ``1 / (1 - 1 / GROWTH)`` = 11 radii of its representative. The
    doubling algorithm of Charikar et al. (2004) is the same with a growth of 2. It keeps keys
    within 2 radii, but leaves most clusters unused if all keys have about the same distance.

    Args:
        radius: delta, in the units of the keys; 0 gives every distinct key a cluster.
        centers: [m] int64 representative of each cluster, which is its first key.
        counts: [m] int64 keys of each cluster, n_i.
        samples: [m, t] int64 tokens drawn uniformly from each cluster, S_i.
        merges: Number of merges so far, which seeds their draws.

    """

    radius: float
    centers: torch.Tensor
    counts: torch.Tensor
    samples: torch.Tensor
    merges: int = 0

    @classmethod
    def empty(cls, radius: float, samples: int) -> "Clusters":
        """Return an empty set of clusters with ``samples`` (t) draws per cluster."""
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(radius, nothing, nothing, nothing.view(0, samples))

    def __len__(self) -> int:
        return len(self.centers)

    def add(
        self,
        points: torch.Tensor,
        begin: int,
        coins: torch.Tensor,
        max_clusters: int,
        toss: Callable[[int], torch.Tensor],
    ) -> None:
        """Add keys, one after another.

        Args:
            points: [n, D] float64 finite key of every column.
            begin: First new column; the other new columns follow it.
            coins: [new keys, t] draws of the new keys in [0, 1).
            max_clusters: Maximum number of clusters, at least 1.
            toss: Returns the [t] draws in [0, 1) of the merge with the given number.

        """
        end = begin + len(coins)
        distance, nearest = self._nearest(points, begin, end)
        at = begin
        while at < end:
            far = (distance[at - begin :] > self.radius).nonzero()
            until = at + int(far[0]) if len(far) else end
            self._join(nearest[at - begin : until - begin], coins[at - begin : until - begin], at)
            at = until
            if at == end:
                return
            self._open(at)
            at += 1
            if len(self) > max_clusters:
                self._widen(points, toss)
                distance[at - begin :], nearest[at - begin :] = self._nearest(points, at, end)
            else:
                new = (points[at:end] - points[at - 1]).norm(dim=-1)
                closer = new < distance[at - begin :]
                distance[at - begin :][closer] = new[closer]
                nearest[at - begin :][closer] = len(self) - 1

    def _nearest(
        self, points: torch.Tensor, begin: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distance of each column to its nearest representative, and its cluster."""
        if not len(self) or begin == end:
            count = end - begin
            return torch.full((count,), math.inf, dtype=points.dtype), torch.zeros(count).long()
        distance = torch.cdist(points[begin:end], points[self.centers], compute_mode=EXACT)
        best = distance.min(-1)
        return best.values, best.indices

    def _join(self, cluster: torch.Tensor, coins: torch.Tensor, begin: int) -> None:
        """Lines 14 to 18: count each key; it replaces every sample with probability 1 / n."""
        if not len(cluster):
            return
        earlier = functional.one_hot(cluster, len(self)).cumsum(0)
        number = self.counts[cluster] + earlier.gather(1, cluster[:, None])[:, 0]
        column = torch.arange(begin, begin + len(cluster))[:, None]
        taken = torch.where(coins * number[:, None] < 1, column, -1)
        last = torch.full_like(self.samples, -1)
        last.scatter_reduce_(0, cluster[:, None].expand_as(taken), taken, "amax")
        self.samples = torch.where(last >= 0, last, self.samples)
        self.counts = self.counts + cluster.bincount(minlength=len(self))

    def _open(self, column: int) -> None:
        """Lines 20 and 21: open a cluster of one key."""
        new = torch.tensor([column])
        self.centers = torch.cat([self.centers, new])
        self.counts = torch.cat([self.counts, torch.ones_like(new)])
        self.samples = torch.cat([self.samples, new.expand(1, self.samples.shape[1])])

    def _widen(self, points: torch.Tensor, toss: Callable[[int], torch.Tensor]) -> None:
        """Increase the radius, and merge each cluster into the nearest earlier one within it."""
        centers = points[self.centers]
        gaps = torch.cdist(centers, centers, compute_mode=EXACT).fill_diagonal_(math.inf)
        self.radius = max(GROWTH * self.radius, float(gaps.min()))
        kept: list[int] = []
        for index, row in enumerate(gaps):
            distance, place = row[kept].min(0) if kept else (math.inf, 0)
            if distance > self.radius:
                kept.append(index)
                continue
            into = kept[int(place)]
            count, both = self.counts[index], self.counts[index] + self.counts[into]
            taken = toss(self.merges) * both < count
            self.merges += 1
            self.samples[into] = torch.where(taken, self.samples[index], self.samples[into])
            self.counts[into] = both
        self.centers, self.counts = self.centers[kept], self.counts[kept]
        self.samples = self.samples[kept]

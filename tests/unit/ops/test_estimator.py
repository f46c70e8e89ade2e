"""SubGen's Algorithm 1: line by line in Python numbers, and what its theorem promises."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nightly import nightly
from vllm_kvevict.ops.torch.estimator import (
    Estimator,
    finite,
    squared_norms,
    weighted_attention,
)
from vllm_kvevict.ops.torch.sample import digest

pytestmark = pytest.mark.slow

ANY = 10**9


@dataclass
class Algorithm1:
    """The paper's procedures, one token at a time.

    Coins of token n are row ``n % 32`` of page ``n // 32``.
    """

    radius: float
    t: int
    s: int
    seed: tuple[int, ...]
    most: int
    mu: float = 0.0
    matrix: list = field(default_factory=list)
    clusters: list = field(default_factory=list)
    length: int = 0
    merges: int = 0

    def coins(self, kind: int, number: int, rows: int) -> list[list[float]]:
        generator = torch.Generator().manual_seed(digest((*self.seed, kind, number)))
        shape = (rows, self.s + self.t)
        return torch.rand(shape, dtype=torch.float64, generator=generator).tolist()

    def token(self, name: int, keys: list, values: list) -> None:
        coins = self.coins(0, self.length // 32, 32)[self.length % 32]
        self.update_softmax_normalizer(name, keys, coins[self.s :])
        norm = math.fsum(x * x for x in values[name])
        self.matrix = self.matrix or [None] * self.s
        for i in range(self.s):
            if norm and coins[i] < norm / (self.mu + norm):
                self.matrix[i] = name
        self.mu += norm
        self.length += 1

    def update_softmax_normalizer(self, name: int, keys: list, coins: list[float]) -> None:
        away = [math.dist(keys[x], keys[name]) for x, _, _ in self.clusters]
        if away and min(away) <= self.radius:
            x, samples, n = self.clusters[away.index(min(away))]
            samples = [
                name if coin < 1 / (n + 1) else s for coin, s in zip(coins, samples, strict=True)
            ]
            self.clusters[away.index(min(away))] = (x, samples, n + 1)
            return
        self.clusters.append((name, [name] * self.t, 1))
        if len(self.clusters) > self.most:
            self.widen(keys)

    def widen(self, keys: list) -> None:
        gaps = [
            math.dist(keys[a[0]], keys[b[0]])
            for i, a in enumerate(self.clusters)
            for b in self.clusters[:i]
        ]
        self.radius = max(1.1 * self.radius, min(gaps))
        kept = []
        for x, samples, n in self.clusters:
            away = [math.dist(keys[x], keys[y]) for y, _, _ in kept]
            if not away or min(away) > self.radius:
                kept.append((x, samples, n))
                continue
            y, others, m = kept[away.index(min(away))]
            coins = self.coins(1, self.merges, 1)[0][self.s :]
            self.merges += 1
            chosen = [
                a if coin * (n + m) < n else b
                for coin, a, b in zip(coins, samples, others, strict=True)
            ]
            kept[away.index(min(away))] = (y, chosen, n + m)
        self.clusters = kept

    def query(self, query: list, keys: list, values: list) -> list[float]:
        def weight(name):
            return math.exp(math.fsum(a * b for a, b in zip(query, keys[name], strict=True)))

        z = [0.0] * len(values[0])
        for name in self.matrix:
            if name is not None:
                norm = math.fsum(x * x for x in values[name])
                for i, x in enumerate(values[name]):
                    z[i] += self.mu / (self.s * norm) * weight(name) * x
        tau = math.fsum(
            n / len(samples) * math.fsum(map(weight, samples)) for _, samples, n in self.clusters
        )
        return [x / tau for x in z]


def blobs(n: int, clusters: int, size: int, seed: int, spread: float = 0.05):
    """Keys [n, size] around distinct middles, and values of uneven norms."""
    generator = torch.Generator().manual_seed(seed)
    middles = torch.randn(clusters, size, generator=generator)
    member = torch.randint(clusters, (n,), generator=generator)
    keys = middles[member] + spread * torch.randn(n, size, generator=generator)
    norms = torch.rand(n, 1, generator=generator) * 3
    return keys, norms * torch.randn(n, size, generator=generator), member


def estimate(estimator: Estimator, query, keys, values):
    """The estimate from what stays in the cache alone."""
    held = estimator.columns
    weights = estimator.log_weights(squared_norms(values))[held]
    return weighted_attention(query @ keys[held].T, values[held], weights)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_algorithm_1(data):
    draw = data.draw
    n, s, t = draw(st.integers(1, 90)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    seed = (draw(st.integers(0, 99)), -3)
    radius = draw(st.sampled_from([0.0, 0.2, 1.0, 50.0]))
    most = draw(st.sampled_from([1, 2, 7, ANY]))
    keys, values, _ = blobs(n, 5, 3, draw(st.integers(0, 99)))
    if draw(st.booleans()):
        keys[1::3] = keys[0]
        values[0] = 0.0
    literal = Algorithm1(radius, t, s, seed, most)
    for name in range(n):
        literal.token(name, keys.double().tolist(), values.double().tolist())
    mine = Estimator.empty(radius, t, s, seed)
    begin = 0
    while begin < n:
        count = draw(st.integers(1, n - begin))
        mine.add(finite(keys), squared_norms(values), begin, count, most)
        begin += count
    assert mine.values.tolist() == [-1 if name is None else name for name in literal.matrix]
    clusters = mine.clusters
    found = zip(clusters.centers, clusters.samples, clusters.counts, strict=True)
    assert [(int(x), names.tolist(), int(m)) for x, names, m in found] == literal.clusters
    assert clusters.radius == pytest.approx(literal.radius)
    assert len(clusters) <= most
    query = torch.randn(2, 3, generator=torch.Generator().manual_seed(n))
    for row, result in zip(query, estimate(mine, query, keys, values), strict=True):
        exact = literal.query(
            row.double().tolist(), keys.double().tolist(), values.double().tolist()
        )
        torch.testing.assert_close(
            result.double(), torch.tensor(exact, dtype=torch.float64), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("radius, most", [(1.0, ANY), (0.0, 24)], ids=["paper", "bounded"])
def test_error_of_equation_3(radius, most):
    """At s = 9 d / eps^2 and t with the variance inside a cluster: at least 0.99 of queries."""
    size, epsilon = 8, 0.5
    bad = total = 0
    for seed in range(12):
        keys, values, _ = blobs(1500, 12, size, seed)
        mine = Estimator.empty(radius, 8, round(9 * size / epsilon**2), (seed,))
        mine.add(finite(keys), squared_norms(values), 0, 1500, most)
        query = torch.randn(50, size, generator=torch.Generator().manual_seed(900 + seed))
        weights = (query @ keys.T).softmax(-1)
        error = (estimate(mine, query, keys, values) - weights @ values).norm(dim=-1)
        bound = epsilon * weights.norm(dim=-1) * torch.linalg.matrix_norm(values, 2)
        bad += int((error > bound).sum())
        total += len(query)
        assert len(mine.columns) < 1500 / 2
    assert bad <= 0.01 * total


@pytest.mark.parametrize("radius, most", [(1.0, ANY), nightly(0.0, 9)], ids=["paper", "bounded"])
def test_numerator_and_denominator_are_unbiased(radius, most):
    """Over seeds both sums average to the exact ones, within four standard errors."""
    keys, values, _ = blobs(100, 6, 4, 1)
    query = torch.tensor([0.4, -0.2, 0.3, 0.1])
    exact = (keys @ query).exp().double()
    rounds = 500
    above, below = [], []
    for seed in range(rounds):
        mine = Estimator.empty(radius, 2, 3, (seed,))
        mine.add(finite(keys), squared_norms(values), 0, 100, most)
        weights = mine.log_weights(squared_norms(values)).double().exp()
        above.append((weights[:, 0] * exact) @ values.double())
        below.append((weights[:, 1] * exact).sum()[None])
    for drawn, truth in ((above, exact @ values.double()), (below, exact.sum()[None])):
        drawn = torch.stack(drawn)
        spread = drawn.std(0) / math.sqrt(rounds)
        assert bool((spread > 0).all())
        assert bool(((drawn.mean(0) - truth).abs() < 4 * spread).all())


def test_samples_of_merged_clusters_are_uniform_and_independent():
    """Two clusters of 3 and 5 become one: every pair of samples comes as often as 1 / 64."""
    keys = torch.tensor([0.0, 0.01, 4.0, 0.02, 4.01, 4.02, 4.03, 4.04, 900.0])[:, None]
    rounds = 3000
    counts = torch.zeros(8, 8)
    for seed in range(rounds):
        mine = Estimator.empty(1.0, 2, 1, (seed,))
        mine.add(finite(keys), squared_norms(keys + 1), 0, 9, 2)
        assert mine.clusters.counts.tolist() == [8, 1]
        first, second = mine.clusters.samples[0].tolist()
        counts[first, second] += 1
    spread = math.sqrt(rounds / 64 * (1 - 1 / 64))
    assert (counts - rounds / 64).abs().max() < 4.5 * spread


def test_memory_grows_with_clusters_and_not_with_length():
    held = {}
    for clusters in (5, 10, 20):
        for n in (1000, 8000):
            keys, values, _ = blobs(n, clusters, 16, clusters)
            mine = Estimator.empty(1.0, 4, 32, (n,))
            mine.add(finite(keys), squared_norms(values), 0, n, ANY)
            assert len(mine.clusters) == clusters
            held[clusters, n] = len(mine.columns)
            assert held[clusters, n] <= 32 + 5 * clusters
    assert all(held[m, 8000] < 1.3 * held[m, 1000] for m in (5, 10, 20))
    assert held[20, 8000] - held[10, 8000] > 35


def test_every_key_is_near_its_representative_after_merges():
    keys, values, _ = blobs(600, 600, 5, 7)
    mine = Estimator.empty(0.0, 1, 1, (0,))
    mine.add(finite(keys), squared_norms(values), 0, 600, 17)
    centers = keys[mine.clusters.centers].double()
    assert 1 < len(centers) <= 17 and int(mine.clusters.counts.sum()) == 600
    gaps = torch.cdist(centers, centers).fill_diagonal_(math.inf)
    assert gaps.min() > mine.clusters.radius > 0
    assert torch.cdist(keys.double(), centers).amin(-1).max() <= 11 * mine.clusters.radius


def test_names_move_with_the_columns():
    keys, values, _ = blobs(300, 9, 4, 2)
    mine = Estimator.empty(1.0, 2, 8, (4,))
    mine.add(finite(keys), squared_norms(values), 0, 250, ANY)
    kept = torch.cat([mine.columns, torch.arange(250, 300)]).unique()
    moved = mine.moved(kept)
    mine.add(finite(keys), squared_norms(values), 250, 50, ANY)
    begin = int((kept < 250).sum())
    moved.add(finite(keys[kept]), squared_norms(values[kept]), begin, 50, ANY)
    assert torch.equal(kept[moved.columns], mine.columns)
    assert torch.equal(
        moved.log_weights(squared_norms(values[kept])),
        mine.log_weights(squared_norms(values))[kept],
    )


def test_weights_of_one_are_attention():
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(3, 2, 40, generator=generator)
    logits[:, 0, 39] = -math.inf
    values = torch.randn(3, 40, 6, generator=generator)
    result = weighted_attention(logits, values, torch.zeros(3, 40, 2))
    torch.testing.assert_close(result, logits.softmax(-1) @ values)


def test_slots_without_a_part_change_nothing():
    generator = torch.Generator().manual_seed(1)
    logits, values = torch.randn(1, 9, generator=generator), torch.randn(9, 2, generator=generator)
    weights = torch.randn(9, 2, generator=generator)
    weights[4:] = -math.inf
    short = weighted_attention(logits[:, :4], values[:4], weights[:4])
    torch.testing.assert_close(weighted_attention(logits + 80, values, weights), short)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_do_not_stop_the_stream(odd):
    keys, values, _ = blobs(100, 100, 4, 3)
    keys[5, 1], values[6, 2] = odd, odd
    mine = Estimator.empty(0.0, 2, 4, (1,))
    mine.add(finite(keys), squared_norms(values), 0, 100, 7)
    assert int(mine.clusters.counts.sum()) == 100 and len(mine.clusters) <= 7
    assert 6 not in mine.values.tolist() and math.isfinite(mine.mass)


def test_coins_differ_by_seed():
    keys, values, _ = blobs(100, 3, 4, 3)
    drawn = []
    for seed in [(1, 2), (2, 1), (1, 2)]:
        mine = Estimator.empty(1.0, 2, 8, seed)
        mine.add(finite(keys), squared_norms(values), 0, 100, ANY)
        drawn.append(mine.columns.tolist())
    assert drawn[0] == drawn[2] != drawn[1]

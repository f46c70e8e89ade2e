"""SubGen's Algorithm 1 as a policy of a bounded cache; the algorithm itself is checked in ops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.policies.base import Candidates, protect
from vllm_kvevict.policies.registry import build_policy
from vllm_kvevict.policies.state import PolicyState
from vllm_kvevict.policies.subgen_stream import SubGenStream

BEHIND = 5
"""Columns that no eviction may take."""


class Head:
    """One layer of a stream, evicted again and again as the worker does it."""

    def __init__(self, scorer: SubGenStream, keep: int, num_heads=2, seed=0, protected=0, **where):
        self.scorer, self.keep, self.protected, self.where = scorer, keep, protected, where
        generator = torch.Generator().manual_seed(seed)
        shape = (num_heads, 700, 6)
        middles = 2 * torch.randn(num_heads, 9, 6, generator=generator)
        member = torch.randint(9, (num_heads, 700, 1), generator=generator).expand(shape)
        self.keys = middles.gather(1, member) + 0.1 * torch.randn(shape, generator=generator)
        self.values = torch.randn(shape, generator=generator)
        self.kept = torch.empty(num_heads, 0, dtype=torch.int64)
        self.weights, self.memory, self.tail_start = None, None, 0

    def evict(self, tail_start: int) -> "Head":
        """Tokens before ``tail_start`` compete; the newest of the others stay."""
        heads = len(self.keys)
        fresh = torch.arange(self.tail_start, tail_start + BEHIND).expand(heads, -1)
        self.tail_start = tail_start
        position = torch.cat([self.kept, fresh], 1)
        index = position[..., None].expand(-1, -1, 6)
        candidates = Candidates(
            keys=self.keys.gather(1, index),
            valid=torch.ones(position.shape, dtype=torch.bool),
            queries=None,
            window=2,
            num_candidates=position.shape[1] - BEHIND,
            scale=1.0,
            keep=self.keep,
            seed=(7,),
            values=self.values.gather(1, index),
            protected=self.protected,
            **self.where,
        )
        summary = self.scorer.summarize(candidates, self.memory)
        self.summary = summary
        scores = protect(summary.scores, candidates.valid, self.protected)
        best = scores.argsort(dim=-1, descending=True, stable=True)[:, : self.keep]
        columns = best.sort(-1).values
        self.memory = self.scorer.moved(summary.streams, columns)
        self.kept = position.gather(1, columns)
        self.weights = summary.log_weights.gather(1, columns[..., None].expand(-1, -1, 2))
        dropped = torch.ones(summary.scores.shape, dtype=torch.bool).scatter(1, columns, False)
        assert bool((summary.log_weights[dropped] == -math.inf).all()), "what counts is kept"
        return self

    def counted(self, head: int) -> dict[int, list[float]]:
        """Log-weights of the positions that play a part."""
        pairs = zip(self.kept[head].tolist(), self.weights[head].tolist(), strict=True)
        return {position: weights for position, weights in pairs if max(weights) > -math.inf}

    def represented(self, head: int) -> list[int]:
        """Positions of the clusters' representatives."""
        return self.kept[head][self.memory[head].estimator.clusters.centers].tolist()


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_evicting_in_pieces_ends_as_evicting_at_once(data):
    draw = data.draw
    scorer = SubGenStream(
        draw(st.sampled_from([0.0, 0.8])), draw(st.integers(1, 4)), draw(st.floats(0.05, 0.9))
    )
    keep, protected = draw(st.sampled_from([32, 64, 96])), draw(st.sampled_from([0, 5, 20]))
    points = draw(st.lists(st.integers(100, 690), min_size=2, max_size=5, unique=True))
    seed = draw(st.integers(0, 9))
    whole = Head(scorer, keep, seed=seed, protected=protected).evict(max(points))
    pieces = Head(scorer, keep, seed=seed, protected=protected)
    for point in sorted(points):
        pieces.evict(point)
    for head in range(2):
        assert pieces.counted(head) == whole.counted(head)
        assert pieces.represented(head) == whole.represented(head)


@pytest.mark.parametrize("protected", [0, 10])
@pytest.mark.parametrize("radius", [0.0, 1.0])
def test_all_tokens_are_counted_once(radius, protected):
    """The denominator's weights add up to the length, and the newest tokens are themselves."""
    head = Head(SubGenStream(radius, 2), 64, protected=protected)
    for point in (200, 300, 500):
        head.evict(point)
        assert head.kept.shape == (2, 64)
        counts = head.weights[..., 1].exp().sum(-1)
        torch.testing.assert_close(counts, torch.full((2,), float(point)))
        for row, stream in enumerate(head.memory):
            alone = head.kept[row][(head.weights[row] == 0).all(-1)].tolist()
            newest = list(range(point - stream.waiting, point))
            assert alone[: protected or None] == list(range(protected)) or not protected
            assert set(newest) <= set(alone)
            assert stream.estimator.length == point - protected - stream.waiting
            used = len(stream.estimator.columns) + stream.waiting + protected
            assert used <= 64


def test_clusters_that_fit_keep_the_paper_s_radius_and_others_widen_it():
    fits = Head(SubGenStream(1.2, 1, 0.3), 128).evict(600)
    assert all(stream.estimator.clusters.radius == 1.2 for stream in fits.memory)
    assert all(len(stream.estimator.clusters) <= 9 for stream in fits.memory)
    tight = Head(SubGenStream(1e-3, 4), 32).evict(600)
    for stream in tight.memory:
        assert len(stream.estimator.clusters) <= 24 // 5
        assert stream.estimator.clusters.radius > 1e-2


def test_slots_are_shared_as_the_flags_say():
    head = Head(SubGenStream(0.0, 3, 0.5), 96, protected=16).evict(600)
    for stream in head.memory:
        assert len(stream.estimator.values) == 40
        assert stream.estimator.clusters.samples.shape[1] == 3
        assert len(stream.estimator.clusters) <= 40 // 4


@pytest.mark.parametrize("where", [dict(layer=1), dict(first_head=2)])
def test_draws_differ_by_seed_layer_and_head(where):
    kept = Head(SubGenStream(), 64).evict(400).kept
    assert torch.equal(kept, Head(SubGenStream(), 64).evict(400).kept)
    assert not torch.equal(kept, Head(SubGenStream(), 64, **where).evict(400).kept)
    assert not torch.equal(kept, Head(SubGenStream(seed=1), 64).evict(400).kept)


def test_a_rank_draws_what_one_rank_alone_draws_for_its_heads():
    both, mine = Head(SubGenStream(), 64), Head(SubGenStream(), 64, first_head=1)
    mine.keys, mine.values, mine.kept = both.keys[1:], both.values[1:], both.kept[1:]
    for point in (200, 400):
        both.evict(point), mine.evict(point)
        assert torch.equal(both.kept[1:], mine.kept)
        assert torch.equal(both.weights[1:], mine.weights)


def test_what_it_cannot_do_is_an_error():
    with pytest.raises(ValueError, match="needs 6 slots in addition to protected tokens, not 5"):
        Head(SubGenStream(), 32, protected=27).evict(400)
    assert Head(SubGenStream(), 32, protected=26).evict(400).kept.shape == (2, 32)


def test_settings_know_the_least_number_of_slots():
    for samples in (1, 4, 16):
        config = EvictionConfig(policy="subgen-stream", options=dict(cluster_samples=samples))
        assert config.min_slots("subgen-stream") == build_policy(config).scorer.min_slots
        assert config.min_slots("snapkv") == 0


def test_a_cleared_row_forgets_and_others_do_not():
    state = PolicyState()
    assert state.get(3, "a") is None
    state.keep(3, "a", "first")
    state.keep(3, "b", "other layer")
    state.keep(5, "a", "other row")
    state.keep(3, "a", "second")
    assert (state.get(3, "a"), state.get(3, "b")) == ("second", "other layer")
    state.clear([3, 4])
    assert state.get(3, "a") is None and state.get(3, "b") is None
    assert state.get(5, "a") == "other row" and len(state) == 1

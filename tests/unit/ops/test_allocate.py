"""Whole-page allocation against every possible split, and against Algorithm 1 as printed."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.ops.torch.allocate import adaptive_pages, shared_pages, uniform_pages

INFINITY = float("inf")


@st.composite
def layers_of_heads(draw, block_sizes=(1, 2, 3)):
    """(rows [L][H] of scores in page-sized pieces, S, block size, floor).

    Scores are small integers, so that sums are exact and ties are common; a page that decides
    the split may thus lie in several heads.
    """
    heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    store, block_size = draw(st.integers(1, 4)), draw(st.sampled_from(block_sizes))
    rows = []
    for _ in range(layers):
        caps = draw(st.lists(st.integers(1, 6), min_size=heads, max_size=heads))
        caps[0] += max(0, store * heads - sum(caps))
        rows.append(
            [
                draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))
                for n in (cap * block_size for cap in draw(st.permutations(caps)))
            ]
        )
    return rows, store, block_size, draw(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))


def tensors(rows, block_size):
    """Right-aligned [L, H, N] scores with -inf padding, and [L, H] caps."""
    columns = max(len(row) for layer in rows for row in layer)
    padded = [[[-INFINITY] * (columns - len(row)) + row for row in layer] for layer in rows]
    caps = [[len(row) // block_size for row in layer] for layer in rows]
    return torch.tensor(padded, dtype=torch.float32), torch.tensor(caps)


def kept_sum(row, tokens):
    return sum(sorted(row, reverse=True)[:tokens])


@settings(deadline=None, max_examples=300)
@given(layers_of_heads())
def test_best_of_all_splits(case):
    rows, store, block_size, floor = case
    scores, caps = tensors(rows, block_size)
    pages = adaptive_pages(scores, caps, store, block_size, floor)
    assert pages.dtype == torch.int64 and pages.shape == caps.shape
    for layer, mine, limits in zip(rows, pages.tolist(), caps.tolist(), strict=True):
        ranges = [range(min(cap, max(1, int(floor * store))), cap + 1) for cap in limits]
        splits = [s for s in itertools.product(*ranges) if sum(s) == store * len(layer)]
        assert tuple(mine) in splits, "sum, floor and caps"

        def value(split, layer=layer):
            return sum(kept_sum(r, n * block_size) for r, n in zip(layer, split, strict=True))

        best = max(map(value, splits))
        assert value(mine) == best
        # Among equally good splits the first heads get most.
        assert tuple(mine) == max(s for s in splits if value(s) == best)


@settings(deadline=None, max_examples=200)
@given(layers_of_heads(block_sizes=(1,)))
def test_blocks_of_one_token_are_algorithm_1(case):
    """Concatenate the heads, take the top B, count per head; safe tokens go in first."""
    rows, store, _, floor = case
    scores, caps = tensors(rows, 1)
    pages = adaptive_pages(scores, caps, store, 1, floor)
    for layer, mine in zip(rows, pages.tolist(), strict=True):
        budget = store * len(layer)
        safe = [min(len(row), max(1, int(floor * store))) for row in layer]
        pairs = [
            (-score, head)
            for head, row in enumerate(layer)
            for score in sorted(row, reverse=True)[safe[head] :]
        ]
        counts = list(safe)
        for _, head in sorted(pairs)[: budget - sum(safe)]:
            counts[head] += 1
        assert mine == counts


def test_gains_are_summed_in_float64():
    """In float32 the small scores vanish, the first two heads look alike, and head 0 wins."""
    large = 2.0**26
    scores = torch.tensor(
        [[[large, large, large, 0.25, 0, 0], [large, large, large, 1, 0, 0], [2 * large] * 6]]
    )
    assert adaptive_pages(scores, torch.full((1, 3), 3), 2, 2, 0.0).tolist() == [[1, 2, 3]]


def test_a_head_of_nan_keeps_its_floor():
    scores = torch.tensor([[[math.nan] * 8, [1.0] * 8, [math.nan] + [-1.0] * 7]])
    assert adaptive_pages(scores, torch.full((1, 3), 4), 2, 2, 0.5).tolist() == [[1, 4, 1]]


def test_all_equal_fills_from_the_first_head():
    pages = adaptive_pages(torch.ones(1, 3, 40), torch.full((1, 3), 10), 5, 4, 0.2)
    assert pages.tolist() == [[10, 4, 1]]


def test_scores_that_are_not_finite_stay_within_the_caps():
    scores = torch.tensor([[[-INFINITY] * 4, [-INFINITY, -INFINITY, -1.0, INFINITY]]])
    assert adaptive_pages(scores, torch.tensor([[4, 1]]), 2, 1, 0.0).tolist() == [[3, 1]]


def test_heads_below_the_floor_keep_all_they_have():
    scores = torch.tensor([[[-INFINITY] * 6 + [0.0] * 2, [9.0] * 8]])
    assert adaptive_pages(scores, torch.tensor([[1, 4]]), 2, 2, 1.0).tolist() == [[1, 3]]


@pytest.mark.parametrize(
    "caps, store, block_size, floor",
    [
        ([[1, 2]], 2, 2, 0.2),
        ([[4, 4], [2, 1]], 2, 2, 0.2),
        ([[5, 4]], 2, 2, 0.2),
        ([[4, 4]], 0, 2, 0.2),
        ([[4, 4]], 2, 2, 1.1),
        ([[4, 4]], 2, 2, -0.1),
        ([[4, 4]], 2, 2, math.nan),
    ],
)
def test_adaptive_refuses(caps, store, block_size, floor):
    with pytest.raises(ValueError):
        adaptive_pages(torch.ones(len(caps), 2, 8), torch.tensor(caps), store, block_size, floor)


def test_uniform():
    caps = torch.tensor([[3, 5], [4, 3]])
    assert uniform_pages(caps, 3).tolist() == [[3, 3], [3, 3]]
    with pytest.raises(ValueError, match="fewer than 4 pages"):
        uniform_pages(caps, 4)


@given(
    shares=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    store=st.integers(1, 5),
    data=st.data(),
)
def test_fixed_shares_are_websters(shares, store, data):
    """One seat after another to the highest share over twice the seats plus one, within caps."""
    heads = len(shares)
    caps = data.draw(st.lists(st.integers(1, 9), min_size=heads, max_size=heads))
    if sum(caps) < store * heads:
        with pytest.raises(ValueError, match="cannot hold"):
            shared_pages(torch.tensor([shares]), torch.tensor([caps]), store)
        return
    expected = [1] * heads
    while sum(expected) < store * heads:
        free = [head for head in range(heads) if expected[head] < caps[head]]
        expected[max(free, key=lambda head: Fraction(shares[head], 2 * expected[head] + 1))] += 1
    found = shared_pages(torch.tensor([shares]), torch.tensor([caps]), store)
    assert found.tolist() == [expected]

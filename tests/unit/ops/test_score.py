"""Window attention against attention spelled out number by number; pooling against torch's
pooling of each row without its padding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from vllm_kvevict.ops.torch.score import pool, window_attention, window_weights
from vllm_kvevict.policies.base import Candidates


def spelled_out(candidates: Candidates) -> list[list[float]]:
    """[H][columns - w] mean attention weights in Python floats."""
    keys, valid = candidates.keys.double().tolist(), candidates.valid.tolist()
    queries, window = candidates.queries.double().tolist(), candidates.window
    columns = len(valid[0])
    result = []
    for head, group in enumerate(queries):
        received = [0.0] * (columns - window)
        for number, query_head in enumerate(group):
            for i, query in enumerate(query_head):
                weights = {}
                for column in range(columns - window + i + 1):
                    if not valid[head][column]:
                        continue
                    logit = candidates.scale * math.fsum(
                        a * b for a, b in zip(query, keys[head][column], strict=True)
                    )
                    if candidates.softcap:
                        logit = candidates.softcap * math.tanh(logit / candidates.softcap)
                    weights[column] = math.exp(logit)
                whole = math.fsum(weights.values())
                if candidates.sinks is not None:
                    whole += math.exp(candidates.sinks[head, number].item())
                for column, weight in weights.items():
                    if column < columns - window:
                        received[column] += weight / whole / len(group) / window
        result.append(received)
    return result


@st.composite
def ragged_candidates(draw):
    """Rows of unequal length; what lies in the padding is not a number."""
    heads, group, window = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    evictable, rest = draw(st.integers(1, 8)), draw(st.integers(0, 2))
    size = draw(st.integers(1, 4))
    columns = evictable + rest + window
    padding = draw(st.lists(st.integers(0, evictable), min_size=heads, max_size=heads))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    valid = torch.arange(columns) >= torch.tensor(padding)[:, None]
    keys = 3 * torch.randn(heads, columns, size, generator=generator)
    return Candidates(
        keys=keys.masked_fill(~valid[..., None], draw(st.sampled_from([math.nan, math.inf, 9.0]))),
        valid=valid,
        queries=torch.randn(heads, group, window, size, generator=generator),
        window=window,
        num_candidates=evictable,
        scale=draw(st.sampled_from([1.0, 0.3])),
        softcap=draw(st.sampled_from([0.0, 0.5, 2.0])),
        sinks=draw(st.sampled_from([None, torch.linspace(-3, 3, heads * group).view(heads, -1)])),
    )


@settings(deadline=None)
@given(ragged_candidates())
def test_window_attention(candidates):
    torch.testing.assert_close(
        window_attention(candidates), torch.tensor(spelled_out(candidates)), atol=2e-6, rtol=1e-4
    )


def test_window_attention_needs_the_whole_window():
    keys, valid = torch.zeros(1, 6, 2), torch.ones(1, 6, dtype=torch.bool)
    for queries in (None, torch.zeros(1, 1, 3, 2)):
        candidates = Candidates(keys, valid, queries, window=2, num_candidates=4, scale=1.0)
        with pytest.raises(ValueError, match="last 2 tokens"):
            window_attention(candidates)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    kernel=st.sampled_from([1, 3, 5, 7]),
    kind=st.sampled_from(["max", "avg"]),
    seed=st.integers(0, 2**31),
    garbage=st.sampled_from([0.0, 100.0, -100.0, math.nan]),
)
def test_pool(lengths, kernel, kind, seed, garbage):
    columns = max(lengths)
    rows = [torch.randn(n, generator=torch.Generator().manual_seed(seed + n)) for n in lengths]
    valid = torch.arange(columns) >= columns - torch.tensor(lengths)[:, None]
    scores = torch.full((len(rows), columns), garbage)
    scores[valid] = torch.cat(rows)
    pooled = pool(scores, valid, kernel, kind)
    assert torch.equal(pooled == -math.inf, ~valid)
    function = {"max": functional.max_pool1d, "avg": functional.avg_pool1d}[kind]
    for row, mine, inside in zip(rows, pooled, valid, strict=True):
        expected = function(row[None, None], kernel, stride=1, padding=kernel // 2)[0, 0]
        torch.testing.assert_close(mine[inside], expected)


@pytest.mark.parametrize("kernel, kind", [(2, "max"), (0, "avg"), (-1, "max"), (3, "median")])
def test_pool_refuses(kernel, kind):
    with pytest.raises(ValueError):
        pool(torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), kernel, kind)


def test_a_query_that_sees_nothing_gives_nothing():
    valid = torch.tensor([[False] * 4 + [True] * 2, [True] * 6])
    candidates = Candidates(
        keys=torch.randn(2, 6, 3),
        valid=valid,
        queries=torch.randn(2, 1, 4, 3),
        window=4,
        num_candidates=2,
        scale=1.0,
    )
    ((heads, rows, weights),) = window_weights(candidates)
    assert range(2)[heads] == range(2) and range(4)[rows] == range(4)
    assert weights.shape == (2, 4, 6)
    assert weights[0].sum(-1).tolist() == [0, 0, pytest.approx(1), pytest.approx(1)]
    assert weights[1].sum(-1).tolist() == [pytest.approx(1)] * 4

"""Selection against sorting Python lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.ops.torch.select import select_tokens

INFINITY = float("inf")


@st.composite
def kept_pages(draw):
    """(rows [L][H] of scores without padding, pages [L][H], block size); ties are common."""
    heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    block_size, store = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows, pages = [], []
    for _ in range(layers):
        shares = [store] * heads
        for _ in range(draw(st.integers(0, 3))):
            giver, taker = draw(st.integers(0, heads - 1)), draw(st.integers(0, heads - 1))
            if shares[giver] > 1:
                shares[giver] -= 1
                shares[taker] += 1
        lengths = [share * block_size + draw(st.integers(0, 6)) for share in shares]
        rows.append([draw(st.lists(st.integers(-2, 3), min_size=n, max_size=n)) for n in lengths])
        pages.append(shares)
    return rows, pages, block_size


@settings(deadline=None, max_examples=200)
@given(kept_pages())
def test_best_scores_of_each_head(case):
    rows, pages, block_size = case
    columns = max(len(row) for layer in rows for row in layer)
    scores, expected = [], []
    for layer, shares in zip(rows, pages, strict=True):
        padded = [[-INFINITY] * (columns - len(row)) + row for row in layer]
        scores.append(padded)
        kept = []
        for row, length, share in zip(padded, map(len, layer), shares, strict=True):
            cached = range(columns - length, columns)
            order = sorted(cached, key=lambda column, row=row: (-row[column], column))
            kept += sorted(order[: share * block_size])
        expected.append(kept)
    result = select_tokens(
        torch.tensor(scores, dtype=torch.float32), torch.tensor(pages), block_size
    )
    assert result.dtype == torch.int64
    assert result.tolist() == expected


def test_ties_in_a_long_row_go_to_the_first_columns():
    """Long enough that an unstable sort would shuffle equal scores."""
    scores = torch.arange(5000).remainder(3).float().expand(1, 2, -1)
    twos, ones = range(2, 5000, 3), range(1, 5000, 3)
    expected = sorted([*twos, *list(ones)[: 2000 - len(twos)]])
    assert select_tokens(scores, torch.tensor([[1, 1]]), 2000).tolist() == [expected * 2]


def test_padding_is_never_kept():
    scores = torch.tensor([[[-INFINITY, 1.0, 2.0], [1.0, 2.0, 3.0]]])
    with pytest.raises(ValueError, match="fewer tokens"):
        select_tokens(scores, torch.tensor([[3, 1]]), 1)


def test_layers_must_keep_equally_many():
    with pytest.raises(ValueError, match="layers keep different numbers"):
        select_tokens(torch.ones(2, 1, 4), torch.tensor([[1], [2]]), 2)

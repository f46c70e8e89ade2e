"""Shares of the value norms, on one rank and on several."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.ops.torch.value_shares import value_shares


def alone(tensor):
    return tensor


norms = st.lists(
    st.lists(st.lists(st.floats(0, 1e3, width=32), min_size=3, max_size=3), min_size=2, max_size=2),
    min_size=1,
    max_size=2,
)


@given(norms)
def test_a_share_of_the_sum_over_the_heads(norms):
    shares = value_shares(torch.tensor(norms), alone)
    for layer, mine in zip(norms, shares.tolist(), strict=True):
        for token in range(3):
            total = math.fsum(head[token] for head in layer)
            for head in range(2):
                expected = layer[head][token] / total if total > 1e-30 else None
                if expected is not None:
                    assert math.isclose(mine[head][token], expected, rel_tol=1e-5, abs_tol=1e-7)
                assert 0 <= mine[head][token] <= 1
            assert total <= 1e-30 or math.isclose(sum(h[token] for h in mine), 1, rel_tol=1e-5)


def test_what_is_no_number_has_no_share_and_leaves_the_other_tokens_alone():
    odd = [0.0, math.nan, math.inf, 3.0]
    shares = value_shares(torch.tensor([[odd, [0.0, 1.0, 1.0, 1.0]]]), alone)
    assert shares.tolist() == [[[0, 0, 0, 0.75], [0, 0, 0, 0.25]]]


def test_two_ranks_share_like_one():
    both = torch.rand(3, 4, 7, generator=torch.Generator().manual_seed(0))
    parts = both.split(2, dim=1)
    total = parts[0].sum(1) + parts[1].sum(1)
    found = [value_shares(part, lambda mine: total) for part in parts]
    torch.testing.assert_close(torch.cat(found, 1), value_shares(both, alone))
    assert not torch.allclose(value_shares(parts[0], alone), value_shares(both, alone)[:, :2])

"""Fitted values, against ridge regression of each head by itself, by normal equations over all
tokens in float64, and against what the fit is for: outputs of the last queries."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.reference import fit
from vllm_kvevict.ops.reference.fit import RIDGE

D = 16


def example(seed, heads, group, columns, window, tail, softcap=0.0, sinks=False):
    """Candidates of one layer, values, and a choice of kept ones."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    valid = torch.ones(heads, columns, dtype=torch.bool)
    valid[0, :3] = False
    candidates = Candidates(
        keys=random(heads, columns, D) * 2,
        valid=valid,
        queries=random(heads, group, window, D),
        window=window,
        num_candidates=columns - tail,
        scale=D**-0.5,
        softcap=softcap,
        sinks=random(heads, group) if sinks else None,
    )
    kept = torch.rand(heads, columns - tail, generator=generator) < 0.4
    kept &= valid[:, : columns - tail]
    return candidates, random(heads, columns, D), kept


def value_shift(candidates, values, kept, rows):
    """The shift of every candidate [H, num_candidates, D], of a choice [H, num_candidates]."""
    columns = [mine.nonzero().flatten() for mine in kept]
    found = torch.zeros(*kept.shape, D)
    shifts = fit.value_shift(candidates, values, columns, rows)
    for mine, chosen, shift in zip(found, columns, shifts, strict=True):
        mine[chosen] = shift
    return found


def weights(candidates, head, query_head, row, rows, seen):
    """One query's attention in float64, written out; None of it on what is not seen."""
    window, columns = candidates.window, candidates.valid.shape[1]
    query = candidates.queries[head, query_head, window - rows + row].double()
    logits = candidates.keys[head].double() @ query * candidates.scale
    if candidates.softcap:
        logits = candidates.softcap * torch.tanh(logits / candidates.softcap)
    own = columns - rows + row
    exp = logits.exp() * seen * (torch.arange(columns) <= own)
    below = exp.sum()
    if candidates.sinks is not None:
        below = below + candidates.sinks[head, query_head].double().exp()
    return exp / below


def outputs(candidates, values, kept, rows):
    """[H, G * rows, D] of all tokens and of kept ones, and the weights of these."""
    found = []
    for head, valid in enumerate(candidates.valid):
        stays = valid.clone()
        stays[: kept.shape[1]] &= kept[head]
        pairs = [
            [weights(candidates, head, g, row, rows, seen) for seen in (valid, stays)]
            for g in range(candidates.queries.shape[1])
            for row in range(rows)
        ]
        full, few = (torch.stack(part) for part in zip(*pairs, strict=True))
        v = values[head].double()
        found.append((full @ v, few @ v, few[:, : kept.shape[1]]))
    return found


@pytest.mark.parametrize("softcap, sinks", [(0.0, False), (3.0, False), (0.0, True)])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_it_is_ridge_regression_of_what_was_lost(rows, softcap, sinks):
    candidates, values, kept = example(rows, 3, 2, 60, 8, 12, softcap, sinks)
    shift = value_shift(candidates, values, kept, rows)
    for head, (full, few, basis) in enumerate(outputs(candidates, values, kept, rows)):
        # The normal equations of min |basis x - lost|^2 + RIDGE |x|^2, over tokens.
        normal = basis.T @ basis + RIDGE * torch.eye(basis.shape[1])
        expected = torch.linalg.solve(normal, basis.T @ (full - few))
        torch.testing.assert_close(shift[head].double(), expected, rtol=1e-3, atol=1e-4)
        assert (shift[head][~kept[head]] == 0).all()
        assert shift[head].abs().max() > 1e-3


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_the_last_queries_never_lose_more_than_before(seed, rows, tail):
    candidates, values, kept = example(seed, 2, 2, 50, 8, tail)
    shift = value_shift(candidates, values, kept, rows)
    fitted = values.clone()
    fitted[:, : kept.shape[1]] += shift
    before = outputs(candidates, values, kept, rows)
    after = outputs(candidates, fitted, kept, rows)
    for (full, few, _), (_, better, _) in zip(before, after, strict=True):
        assert (full - better).norm() <= (full - few).norm() * (1 + 1e-4) + 1e-5


def test_nothing_evicted_moves_nothing():
    candidates, values, kept = example(5, 2, 2, 50, 8, 10)
    shift = value_shift(candidates, values, candidates.valid[:, : kept.shape[1]].clone(), 4)
    assert shift.abs().max() < 1e-5


def test_queries_are_needed():
    candidates, values, kept = example(6, 2, 2, 50, 8, 10)
    with pytest.raises(ValueError, match="last 9 queries"):
        value_shift(candidates, values, kept, 9)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("of_keys", [True, False])
def test_a_head_with_what_is_no_number_keeps_its_values(number, of_keys):
    candidates, values, kept = example(7, 3, 2, 50, 8, 10)
    expected = value_shift(candidates, values, kept, 4)
    (candidates.keys if of_keys else values)[1, 20] = number
    shift = value_shift(candidates, values, kept, 4)
    assert (shift[1] == 0).all()
    torch.testing.assert_close(shift[[0, 2]], expected[[0, 2]])

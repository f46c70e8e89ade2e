"""Peaks of the window's attention against attention spelled out number by number."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.policies.spelled_out import attention, cases
from tests.unit.policies.test_policies import random_candidates
from vllm_kvevict.ops.torch import score
from vllm_kvevict.ops.torch.defensive import window_peaks
from vllm_kvevict.policies.base import Candidates


def spelled_out(
    candidates: Candidates, kernel: int, before: int, after: int
) -> list[dict[int, float]]:
    """[H] by token, a candidate or before the window: the highest average near it, floored."""
    last = max(candidates.valid.shape[1] - candidates.window, candidates.num_candidates)
    found = []
    for head in range(candidates.num_heads):
        mine = [c for c in range(last) if candidates.valid[head, c]]
        highest = {}
        for c in mine:
            averages = []
            for rows in attention(candidates, head):
                for row in rows:
                    near = range(c - kernel // 2, c + kernel // 2 + 1)
                    averages.append(math.fsum(row.get(n, 0) for n in near if n < last) / kernel)
            highest[c] = max(averages)
        highest = {
            c: max(peak for n, peak in highest.items() if c - after <= n <= c + before)
            for c in mine
        }
        mean = math.fsum(highest.values()) / len(mine)
        found.append({c: max(peak, mean) for c, peak in highest.items()})
    return found


@settings(deadline=None)
@given(
    cases(),
    st.sampled_from([1, 3, 5, 7]),
    st.sampled_from([(0, 0), (1, 1), (2, 14), (14, 2)]),
    st.sampled_from([(1, 1), (1, 2), (1, 16), (200, 4), (2**20, 16)]),
)
def test_window_peaks(case, kernel, covers, memory):
    """However few heads and rows stand in memory at once."""
    limits = score.LOGITS, score.MIN_ROWS
    score.LOGITS, score.MIN_ROWS = memory
    try:
        peaks = window_peaks(case.candidates, kernel, *covers)
    finally:
        score.LOGITS, score.MIN_ROWS = limits
    assert peaks.dtype == torch.float32
    assert peaks.shape[1] == case.candidates.valid.shape[1] - case.candidates.window
    for mine, expected in zip(peaks, spelled_out(case.candidates, kernel, *covers), strict=True):
        torch.testing.assert_close(
            mine[list(expected)], torch.tensor(list(expected.values())), atol=2e-6, rtol=1e-4
        )


@settings(deadline=None)
@given(cases(), st.integers(0, 40))
def test_candidates_inside_the_window(case, protected):
    """Queries in front of one give it nothing."""
    columns = case.candidates.valid.shape[1]
    most = max(case.candidates.num_candidates, columns - protected)
    inside = replace(case.candidates, num_candidates=most)
    peaks = window_peaks(inside, 5, 2, 14)
    assert peaks.shape[1] == max(most, columns - inside.window)
    for mine, expected in zip(peaks, spelled_out(inside, 5, 2, 14), strict=True):
        torch.testing.assert_close(
            mine[list(expected)], torch.tensor(list(expected.values())), atol=2e-6, rtol=1e-4
        )


@settings(deadline=None)
@given(cases())
def test_bounds(case):
    """Peaks lie in [0, 1], the least is at least a mean's share; a wider average lowers the top.

    A wider maximum lowers nothing.
    """
    narrow, wide = (window_peaks(case.candidates, kernel, 0, 0) for kernel in (1, 5))
    far = window_peaks(case.candidates, 5, 2, 14)
    for head, valid in enumerate(case.candidates.valid[:, : narrow.shape[1]]):
        for peaks in (narrow[head, valid], wide[head, valid]):
            assert 0 <= peaks.max() / len(peaks) <= peaks.min() * (1 + 1e-5)
        assert bool((wide[head, valid] <= far[head, valid]).all())
        assert wide[head, valid].max() <= narrow[head, valid].max() + 1e-6 <= 1 + 1e-5


def test_needs_the_whole_window():
    candidates = random_candidates()
    for queries in (None, candidates.queries[:, :, 1:]):
        with pytest.raises(ValueError, match="last 4 tokens"):
            window_peaks(replace(candidates, queries=queries), 5, 2, 14)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_head(number):
    candidates = random_candidates()
    expected = window_peaks(candidates, 5, 2, 14)
    candidates.keys[1, 7] = number
    peaks = window_peaks(candidates, 5, 2, 14)
    assert bool(peaks[1].isnan().any())
    others = [head for head in range(candidates.num_heads) if head != 1]
    torch.testing.assert_close(peaks[others], expected[others])


def test_a_head_with_fewer_tokens_than_the_window():
    """Its first queries come before all that it holds: they give it nothing."""
    window, width, held = 40, 60, (60, 25, 1)
    generator = torch.Generator().manual_seed(0)
    valid = torch.arange(width) >= width - torch.tensor(held)[:, None]
    keys = torch.randn(3, width, 4, generator=generator)
    candidates = Candidates(
        keys=keys.masked_fill(~valid[..., None], math.nan),
        valid=valid,
        queries=torch.randn(3, 2, window, 4, generator=generator),
        window=window,
        num_candidates=width,
        scale=1.0,
    )
    peaks = window_peaks(candidates, 5, 2, 14)
    for mine, expected in zip(peaks, spelled_out(candidates, 5, 2, 14), strict=True):
        torch.testing.assert_close(
            mine[list(expected)], torch.tensor(list(expected.values())), atol=2e-6, rtol=1e-4
        )

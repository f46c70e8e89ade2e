"""Bins against plain loops."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.tools.inspect.bins import bin_edges, bin_maxima, bin_means


@given(st.lists(st.integers(0, 9), min_size=1, max_size=300), st.integers(1, 40))
def test_bins_equal_loops(values, limit) -> None:
    edges = bin_edges(0, len(values), limit)
    assert len(edges) - 1 <= limit
    assert edges[0] == 0 and edges[-1] == len(values)
    parts = [values[a:b] for a, b in pairwise(edges)]
    assert all(parts)
    both = np.array([values, values[::-1]], dtype=np.float64)
    assert np.allclose(bin_means(both, edges)[0], [sum(p) / len(p) for p in parts])
    assert bin_maxima(both, edges)[0].tolist() == [max(p) for p in parts]


def test_a_short_prompt_is_not_binned() -> None:
    assert bin_edges(0, 5, 1000).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_long_prompt_is() -> None:
    assert len(bin_edges(0, 100_001, 1000)) == 992

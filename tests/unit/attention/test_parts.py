"""Parts of a step: every sequence in one of them, none larger than asked for."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.attention.xformers.parts import cut


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 10))
def test_parts(counts, most):
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    parts = cut(starts, torch.tensor(starts, dtype=torch.int32), most)
    assert [n for part in parts for n in range(part.first, part.last)] == list(range(len(counts)))
    assert [n for part in parts for n in range(part.begin, part.end)] == list(range(starts[-1]))
    for part in parts:
        assert part.last - part.first <= most
        own = counts[part.first : part.last]
        assert part.starts == [0, *torch.tensor(own).cumsum(0).tolist()]
        assert part.on_device.tolist() == part.starts and part.on_device.dtype == torch.int32
        assert part.longest == max(own)

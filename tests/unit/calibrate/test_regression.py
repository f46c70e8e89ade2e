"""The window's score as a probe learns beside it: that of the policy."""

import torch

from vllm_kvevict.calibrate.regression import KERNEL, window_feature
from vllm_kvevict.ops.candidates import Candidates
from vllm_kvevict.ops.torch.defensive import AFTER, BEFORE, window_peaks

HEADS, GROUP, WINDOW, TOKENS, RECENT, SIZE, SCALE, SOFTCAP = 2, 3, 4, 40, 2, 8, 0.3, 20.0


def test_sinks_take_attention_from_the_window() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(HEADS, TOKENS, SIZE, generator=generator)
    queries = torch.randn(HEADS, GROUP, WINDOW, SIZE, generator=generator)
    columns = TOKENS - RECENT
    shares = torch.rand(HEADS, columns, generator=generator) + 0.1
    found = []
    for sinks in (None, 3 + torch.randn(HEADS, GROUP, generator=generator)):
        valid = torch.ones(HEADS, TOKENS, dtype=torch.bool)
        served = Candidates(keys, valid, queries, WINDOW, columns, SCALE, SOFTCAP, sinks=sinks)
        peaks = window_peaks(served, KERNEL, BEFORE, AFTER)
        found.append(window_feature(keys, queries, shares, SCALE, SOFTCAP, sinks))
        torch.testing.assert_close(found[-1], (peaks * shares).log())
    assert bool((found[1] < found[0]).all())

"""Measuring evictions on a GPU never waits for it."""

import pytest
import torch

from vllm_kvevict.worker.meter import EvictionMeter

pytestmark = pytest.mark.gpu


def test_values_arrive_without_a_wait():
    device = torch.device("cuda")
    pages = torch.tensor([[1, 3], [2, 2]], device=device)
    torch.zeros((), pin_memory=True)
    torch.cuda.synchronize()
    meter = EvictionMeter(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with meter.evictions(1):
            torch.cuda._sleep(10**9)
            meter.pages(pages)
        assert meter.take() is None, "the device has not come so far"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    measured = meter.take()
    assert measured is not None and measured["head_spread"] == [1.25]
    (seconds,) = measured["seconds"]
    assert seconds > 0
    assert meter.take() is None

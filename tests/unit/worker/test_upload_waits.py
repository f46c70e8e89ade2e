"""Evictions by the PyTorch operations upload from pinned memory alone, and wait for no upload.

They read the device: only evictions by the kernels do not. The device is pretended.
"""

import pytest

from tests.kernels.evict import run, steps, worker
from tests.pretend_gpu import pretended
from tests.unit.worker.test_device import ON_CUDA

pytestmark = pytest.mark.usefixtures("one_rank")


def uploads(policy, monkeypatch, fp8=False, shares=False):
    """What the host waited for to reach the device, in four evictions."""
    with pretended(monkeypatch) as watch:
        made = worker(policy, fused=False, device="cuda", fp8=fp8, shares=shares)
        if made._prompts is not None:
            made._prompts.digest = lambda name: 5
            made._prompts.begin_step = lambda output: None
        watch.waits.clear()
        run(made, steps(policy))
    assert made.evictions == 4 and watch.launches
    return [wait for wait in watch.waits if "upload" in wait]


@pytest.mark.parametrize("policy", ON_CUDA)
def test_no_upload_is_waited_for(policy, monkeypatch):
    assert not uploads(policy, monkeypatch)


@pytest.mark.parametrize("options", [dict(fp8=True), dict(shares=True)], ids=["fp8", "shares"])
def test_nor_over_other_caches_and_shares(options, monkeypatch):
    assert not uploads("snapkv", monkeypatch, **options)

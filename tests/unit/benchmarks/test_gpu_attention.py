"""The attention benchmark's verdict is that of the kernel that a server runs."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms.interface import DeviceCapability

from benchmarks.gpu import attention
from vllm_kvevict.attention import choice
from vllm_kvevict.attention.scratch import Shape


@pytest.mark.parametrize(
    ("capability", "requests", "fp8", "kernel"),
    [
        ((9, 0), 3, False, "triton"),
        ((9, 0), 3, True, "flash per head"),
        ((9, 0), 999, True, "triton"),
        ((10, 0), 3, False, "flash per head"),
        ((10, 0), 999, False, "triton"),
        ((8, 0), 3, False, "triton"),
        ((7, 5), 3, False, "triton"),
        (None, 3, False, "triton"),
    ],
)
def test_the_kernel_that_a_server_runs(capability, requests, fp8, kernel, monkeypatch):
    """As ``auto`` says in docs/gpu.md, for each GPU; more than 992 sequences are ours."""
    from vllm.platforms import current_platform

    found = None if capability is None else DeviceCapability(*capability)
    monkeypatch.setattr(current_platform, "get_device_capability", lambda: found)
    monkeypatch.setattr(choice, "loads", lambda version: True)
    shape = Shape(8, 4, 128, 16, requests, 4096, fp8=fp8)
    step = SimpleNamespace(shape=shape, dtype=torch.bfloat16, requests=requests)
    assert attention.served(step) == kernel

"""A result file names the machine it was measured on."""

import pytest
import torch

from benchmarks.provenance import provenance


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = provenance()
    assert found["machine"].endswith("no GPU used")
    assert found["versions"]["vllm"] and found["commit"]


def test_the_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA H200", "NVIDIA H200", "NVIDIA L4"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    assert provenance()["machine"].endswith("2 NVIDIA H200 + 1 NVIDIA L4")

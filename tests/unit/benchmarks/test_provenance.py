"""A result file names the machine it was measured on."""

from pathlib import Path

import pytest
import torch

from benchmarks.provenance import UNKNOWN, commit, provenance


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


def test_a_commit_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KVEVICT_COMMIT", raising=False)
    assert commit() == UNKNOWN
    monkeypatch.setenv("KVEVICT_COMMIT", "abc-dirty")
    assert commit() == "abc-dirty"

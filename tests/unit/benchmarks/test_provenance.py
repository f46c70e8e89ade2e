"""A result file names the machine, the models and the profiles with which it was measured."""

import hashlib
from pathlib import Path

import pytest
import torch

from benchmarks import provenance as module
from benchmarks.provenance import (
    UNKNOWN,
    add_server,
    commit,
    provenance,
    sentence,
    weights_sha256,
)


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


@pytest.fixture
def nothing_served(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_models", "_profiles", "_servers"):
        monkeypatch.setattr(module, name, {})


@pytest.mark.usefixtures("nothing_served")
def test_what_was_served(tmp_path: Path) -> None:
    assert provenance()["models"] == {} and provenance()["servers"] == []
    (tmp_path / "b.safetensors").write_bytes(b"second")
    (tmp_path / "a.safetensors").write_bytes(b"first")
    weights, profile = hashlib.sha256(b"firstsecond").hexdigest(), "0123456789abcdef" * 4
    line = f"INFO 01:02 [a.py:1] KV eviction: the profile is /p/one two.json (SHA-256 {profile}).\n"
    for args in (["--seed", "0"], ["--kv-eviction", "auto"], ["--seed", "0"]):
        add_server(str(tmp_path), args, f"before\n{line}after")
    add_server("owner/name", [], "a log without a profile")
    found = provenance()
    assert found["models"] == {str(tmp_path): weights, "owner/name": None}
    assert found["profiles"] == {"/p/one two.json": profile}
    assert found["servers"] == [
        f"{tmp_path} --seed 0", f"{tmp_path} --kv-eviction auto", "owner/name"
    ]  # fmt: skip
    text = sentence(found, "8 samples")
    assert f"commit {found['commit']}; 8 samples. Model {tmp_path} (SHA-256 {weights}). " in text
    assert f"Model owner/name (SHA-256 {UNKNOWN}). Profile /p/one two.json " in text
    assert text.endswith(".") and f"{profile}). {found['machine']}. vllm " in text


@pytest.mark.usefixtures("nothing_served")
def test_paths_in_the_checkout_are_relative() -> None:
    root = Path(module.__file__).parents[1]
    add_server(f"{root}/.cache/models/none", ["--seed", "0"], "")
    assert provenance()["models"] == {".cache/models/none": None}
    assert provenance()["servers"] == [".cache/models/none --seed 0"]


def test_a_model_without_weights(tmp_path: Path) -> None:
    assert weights_sha256(tmp_path) is None

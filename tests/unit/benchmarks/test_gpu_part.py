"""Rows of another GPU or of other code are not taken, and nothing is overwritten."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import part
from benchmarks.gpu.part import Part
from benchmarks.provenance import UNKNOWN

SOURCE = dict(commit="c", command="python", date="d", versions={}, machine="m")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def source(monkeypatch):
    found = dict(SOURCE)
    monkeypatch.setattr(part, "provenance", lambda: dict(found))
    return found


def made(folder: Path, until: float = 0, **settings: Any) -> Part:
    settings = dict(heads=8, batches=[1, 2]) | settings
    args = Namespace(output=folder / "attention.json", until=until, **settings)
    return Part("attention", args, CPU, choice=("batches",))


def test_rows_of_another_gpu_are_kept_aside(tmp_path, monkeypatch):
    made(tmp_path).add(dict(requests=1), dict(took=2))
    monkeypatch.setattr(part, "describe", lambda device: "another card")
    other = made(tmp_path)
    assert not other.rows
    other.add(dict(requests=1), dict(took=5))
    monkeypatch.undo()
    monkeypatch.setattr(part, "provenance", lambda: dict(SOURCE))
    assert made(tmp_path).rows == [dict(requests=1, took=2)]
    names = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert names.keys() == {"attention.json", "attention-2.json"}
    assert names["attention-2.json"]["rows"] == [dict(requests=1, took=5)]


@pytest.mark.parametrize("change", ["commit", "versions", "settings", "unknown"])
def test_rows_of_other_code_are_not_taken(change, tmp_path, source):
    source["commit"] = UNKNOWN if change == "unknown" else "c"
    made(tmp_path).add(dict(requests=1), dict(took=2))
    source |= dict(commit="later") if change == "commit" else {}
    source |= dict(versions=dict(torch="2")) if change == "versions" else {}
    assert not made(tmp_path, heads=4 if change == "settings" else 8).rows
    assert (tmp_path / "attention-1.json").exists()

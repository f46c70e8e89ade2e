"""Parts go on where they stopped, keep to their time, and overwrite nothing."""

import json
import time
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


def test_a_part_goes_on_where_it_stopped(tmp_path, source):
    made(tmp_path / "new").add(dict(requests=1), dict(took=2))
    source["machine"] = "another host with the same GPU"
    moved = tmp_path / "moved"
    (tmp_path / "new").rename(moved)
    again = made(moved, until=time.time() + 9, batches=[1])
    assert again.has(dict(requests=1)) and not again.has(dict(requests=2))
    again.add(dict(requests=2), dict(took=3))
    assert len(json.loads(again.path.read_text())["rows"]) == 2


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


def test_rows_that_failed_are_tried_again_last(tmp_path):
    tried: list[int] = []
    keys = [dict(requests=n) for n in (1, 2, 3)]

    def run(key: dict[str, Any]) -> dict[str, Any]:
        tried.append(key["requests"])
        if tried == [1]:
            raise ValueError("x" * part.MOST_ERROR + " out of memory")
        return dict(took=4)

    first = made(tmp_path)
    first.measure(keys[:2], lambda key: 1, run)
    error = first.rows[0]["error"]
    assert error.endswith("out of memory") and len(error) == part.MOST_ERROR
    assert first.outcome() == "attention: 1 rows failed, 0 did not fit; run it again"
    again = made(tmp_path)
    again.measure(keys, lambda key: 1, run)
    assert tried == [1, 2, 3, 1] and again.outcome() is None
    assert sorted(row["requests"] for row in again.rows) == [1, 2, 3]


def test_a_row_that_does_not_fit_is_left(tmp_path, capsys):
    late = made(tmp_path, until=time.time() + 60)
    late.measure(
        [dict(requests=n) for n in (1, 2)], lambda key: 100 / key["requests"], lambda key: {}
    )
    assert [row["requests"] for row in late.rows] == [2]
    assert "not measured: {'requests': 1}: about 100 s needed, " in capsys.readouterr().out
    assert late.outcome() == "attention: 0 rows failed, 1 did not fit; run it again"

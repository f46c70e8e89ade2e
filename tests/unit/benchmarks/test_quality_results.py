"""From scores to tables and files: what is averaged, left out, compared and drawn."""

import re

import pytest

from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.figure import draw
from benchmarks.quality.intervals import Estimate
from benchmarks.quality.kvpress_baseline import TRANSFORMERS_FULL
from benchmarks.quality.plots import plot
from benchmarks.quality.prompt import AGNOSTIC, AWARE, SCENARIOS
from benchmarks.quality.results import AVERAGE, summarize
from benchmarks.quality.table import markdown, points

BUDGETS = ("10%", "40%")
LABELS = ("snapkv", "ada-snapkv", "ada-snapkv, avg 5", "kvpress snapkv", "kvpress ada-snapkv")


def cells() -> list[Cell]:
    return [Cell(s, label, b) for s in SCENARIOS for label in LABELS for b in BUDGETS]


@pytest.fixture(scope="module")
def scores():
    """Accuracy rises with label and budget; ``cwe`` is not learnt."""
    found = {FULL_CELL: {"lines": [1.0] * 8, "vt": [1.0, 0.5] * 4, "cwe": [0.2] * 8}}
    found[TRANSFORMERS_FULL] = found[FULL_CELL]
    for cell in cells():
        hits = 1 + LABELS.index(cell.label) + 2 * BUDGETS.index(cell.budget)
        row = [1.0] * hits + [0.0] * (8 - hits)
        found[cell] = {"lines": row, "vt": [score / 2 for score in row], "cwe": [0.0] * 8}
    return found


@pytest.fixture(scope="module")
def results(scores):
    return summarize(scores, threshold=0.5)


@pytest.fixture(scope="module")
def kept():
    return {
        (s, b): dict(tokens=100.0, point=900.0, covered=0.25) for s in SCENARIOS for b in BUDGETS
    }


def test_averages_and_what_is_left_out(results):
    assert results.tasks == ("lines", "vt")
    assert results.left_out["cwe"].mean == pytest.approx(0.2)
    assert results.full[AVERAGE].mean == pytest.approx((1 + 0.75) / 2)
    found = results.estimates[Cell(AWARE, "ada-snapkv", "40%")]
    assert found[AVERAGE].mean == pytest.approx((4 / 8 + 2 / 8) / 2)
    assert set(found) == {"lines", "vt", AVERAGE}


def test_no_task_at_all_is_an_error(scores):
    with pytest.raises(ValueError, match=r"no task reaches 101%.*lines 100\.0%"):
        summarize(scores, threshold=1.01)


def test_differences(results):
    pairs = {
        (first.label, second.label): found.mean
        for (first, second), found in results.differences.items()
        if (first.scenario, first.budget) == (AGNOSTIC, "10%")
    }
    step = (1 / 8 + 1 / 16) / 2
    assert pairs == pytest.approx(
        {
            ("ada-snapkv", "snapkv"): step,
            ("snapkv", "kvpress snapkv"): -3 * step,
            ("ada-snapkv", "kvpress ada-snapkv"): -3 * step,
            ("ada-snapkv, avg 5", "kvpress ada-snapkv"): -2 * step,
            ("kvpress ada-snapkv", "kvpress snapkv"): step,
        }
    )


def test_every_cell_is_in_the_tables(results, kept):
    text = markdown(results, kept)
    tables = re.findall(r"(?:^\|.*\|\n?)+", text, re.MULTILINE)
    for table in tables:
        widths = {line.count(" | ") for line in table.strip().splitlines()}
        assert len(widths) == 1, table
    for task in (*results.tasks, AVERAGE):
        for budget in BUDGETS:
            found = results.estimates[Cell(AWARE, "ada-snapkv, avg 5", budget)][task]
            assert f"{100 * found.mean:.1f} [" in text
    assert sum(line.startswith("|  | ") for line in text.splitlines()) == 2 * 3 * len(LABELS)
    assert "Left out" in text and "cwe 20.0" in text
    assert "100 of 900" in text and "25%" in text


def test_json_has_an_entry_for_every_cell_and_task(results):
    entries = results.as_json()["cells"]
    assert len(entries) == (len(cells()) + 2) * 3
    assert all(0 <= entry["low"] <= entry["mean"] <= entry["high"] <= 1 for entry in entries)


def test_only_a_clear_difference_is_bold():
    assert points(Estimate(0.02, -0.01, 0.05, 9)) == "+2.0 [-1.0, +5.0]"
    assert points(Estimate(-0.02, -0.03, -0.01, 9)) == "**-2.0 [-3.0, -1.0]**"


def test_one_picture_of_two_results(results, tmp_path):
    draw([results.as_json(), results.as_json()], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000


def test_plots(results, tmp_path):
    paths = plot(results, tmp_path / "quality.json")
    assert [path.name for path in paths] == [f"quality_{scenario}.png" for scenario in SCENARIOS]
    first = [path.read_bytes() for path in paths]
    assert all(data.startswith(b"\x89PNG") and len(data) > 20_000 for data in first)
    again = [path.read_bytes() for path in plot(results, tmp_path / "quality.json")]
    assert first == again, "the same results draw the same picture"

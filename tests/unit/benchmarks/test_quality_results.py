"""From scores to results: what is averaged, left out and compared."""

import pytest

from benchmarks.quality.cell import FULL_CELL, Cell
from benchmarks.quality.kvpress_baseline import TRANSFORMERS_FULL
from benchmarks.quality.prompt import AGNOSTIC, AWARE, SCENARIOS
from benchmarks.quality.results import AVERAGE, summarize

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


def test_averages_and_what_is_left_out(results):
    assert results.tasks == ("lines", "vt")
    assert results.left_out["cwe"].mean == pytest.approx(0.2)
    assert results.full[AVERAGE].mean == pytest.approx((1 + 0.75) / 2)
    found = results.estimates[Cell(AWARE, "ada-snapkv", "40%")]
    assert found[AVERAGE].mean == pytest.approx((4 / 8 + 2 / 8) / 2)
    assert set(found) == {"lines", "vt", AVERAGE}


def test_no_task_at_all_is_an_error(scores):
    with pytest.raises(ValueError, match=r"no task reaches 101%.*lines 100\.0%.*--resume"):
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

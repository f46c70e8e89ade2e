"""Which combinations of arguments ``make test`` runs."""

from itertools import product

import pytest

from tests.nightly import covering, nightly

AXES = [
    (range(10), "ab", "cd"),
    ("ab", "cd", "ef"),
    ("pqrs", "ab", "xyz"),
]


def daily(found: list) -> list[tuple]:
    return [one.values for one in found if not any(mark.name == "nightly" for mark in one.marks)]


@pytest.mark.parametrize("axes", AXES, ids=range(len(AXES)))
def test_no_value_is_missing_and_few_combinations_run(axes):
    found = covering(*axes)
    assert [one.values for one in found] == list(product(*axes))
    run = daily(found)
    assert len(run) == max(map(len, axes))
    for values, axis in zip(zip(*run, strict=True), axes, strict=True):
        assert set(values) == set(axis)
    if axes is AXES[0]:
        assert {row[1:] for row in run} == set(product("ab", "cd")), "pairs meet"


def test_marks_and_names_stay():
    slow = pytest.param("s", marks=pytest.mark.slow, id="slow one")
    found = covering([slow, nightly("n"), 3], [pytest.param(1, 2), pytest.param(4, 5)])
    assert daily(found) == [("s", 1, 2), (3, 4, 5)]
    assert [one.id for one in found][:2] == ["slow one-1-2", "slow one-4-5"]
    assert all(mark.name == "slow" for mark in found[0].marks)
    assert {mark.name for mark in found[1].marks} == {"slow", "nightly"}

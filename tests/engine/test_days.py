"""Random days are the same in every process."""

import importlib
from pathlib import Path

import pytest

from tests.engine import days
from tests.engine.scenarios import Scenario


def drawn() -> list[str]:
    """The days of one round."""
    found: list[str] = []

    def note(scenario: Scenario) -> None:
        found.append(repr(scenario))

    days.play(note, 40)
    return found


def test_a_seed_draws_the_same_days_whatever_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawn()
    assert len(before) == 40
    (tmp_path / "further_constants.py").write_text(f"NUMBERS = {list(range(2, 200))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("further_constants")
    assert drawn() == before

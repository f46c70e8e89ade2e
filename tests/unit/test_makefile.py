"""What ``make test`` leaves out, ``make nightly`` runs."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_file_with_a_nightly_test_is_run_at_night():
    targets = (ROOT / "Makefile").read_text().split("\n\n")
    run = {
        word
        for target in targets
        if " -m" in target and "nightly" in target
        for word in target.split()
    }
    marked = [
        file.relative_to(ROOT)
        for file in (ROOT / "tests").rglob("test_*.py")
        if file != Path(__file__) and "mark.nightly" in file.read_text()
    ]
    assert len(marked) > 10
    assert [file for file in marked if run.isdisjoint(map(str, [file, *file.parents]))] == []

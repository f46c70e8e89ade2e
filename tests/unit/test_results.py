"""Result files are linked from pages, and name commits of this history."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(path for path in RESULTS.rglob("*") if path.is_file())
TEXTS = [path for path in FILES if path.suffix != ".png"]
LINK = re.compile(r"\]\(([^)#\s]+)")
COMMIT = re.compile(r"\bcommit\"?:? \"?([0-9a-f]{7,40})\b")


def pages() -> list[Path]:
    """Pages that users read."""
    patterns = (
        "README.md",
        "CONTRIBUTING.md",
        "docs/**/*.md",
        "deploy/**/*.md",
        "benchmarks/**/README.md",
    )
    return [page for pattern in patterns for page in ROOT.glob(pattern)]


def commits(text: str) -> set[str]:
    """Commits that a result file says it was measured with."""
    return set(COMMIT.findall(text))


def exists(commit: str) -> bool:
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def complete_history() -> bool:
    """True in a checkout that is not shallow."""
    if not (ROOT / ".git").exists():
        return False
    command = ["git", "rev-parse", "--is-shallow-repository"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == "false\n"


def test_every_file_is_linked_from_a_page():
    linked = {
        Path(os.path.normpath(page.parent / link))
        for page in pages()
        for link in LINK.findall(page.read_text())
    }
    assert FILES
    assert not [str(path.relative_to(ROOT)) for path in FILES if path not in linked]


def test_commits_are_found_in_reports_and_in_json():
    assert commits("2026-11-25 08:50 UTC, commit 0ef7c81. Model") == {"0ef7c81"}
    assert commits('"commit": "3918ffd",') == {"3918ffd"}
    assert commits("commit 6be1329-dirty") == {"6be1329"}
    assert not commits("evictions 600, tokens_evicted 628704")


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_file_names_a_clean_commit(path: Path):
    text = path.read_text()
    assert commits(text), "names no commit"
    assert "dirty" not in text


@pytest.mark.skipif(not complete_history(), reason="needs the complete git history")
@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_its_commits_exist(path: Path):
    assert exists("HEAD") and not exists("0" * 40)
    assert not {commit for commit in commits(path.read_text()) if not exists(commit)}

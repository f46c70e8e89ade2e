"""What must stay small: flags, words of documentation, the engine, files."""

from pathlib import Path

import pytest

import vllm_kvevict
from vllm_kvevict.settings.config import EvictionConfig

PACKAGE = Path(vllm_kvevict.__file__).parent
ROOT = PACKAGE.parent


def lines(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.rglob("*.py"))


def test_flags():
    assert len(EvictionConfig.model_fields) <= 16


def test_words_of_documentation():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    words = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in pages}
    assert sum(words.values()) <= 25000, words


def test_the_engine():
    files = list((PACKAGE / "engine").glob("*.py"))
    assert len(files) <= 12 and lines(PACKAGE / "engine") <= 2400


@pytest.mark.parametrize("folder", ["vllm_kvevict", "benchmarks", "tests"])
def test_no_file_is_long(folder):
    files = (ROOT / folder).rglob("*.py")
    long = {file.name: n for file in files if (n := len(file.read_text().splitlines())) > 400}
    assert not long

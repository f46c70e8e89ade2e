"""The length of source files."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 600


@pytest.mark.parametrize("folder", ["vllm_kvevict", "benchmarks", "tests"])
def test_no_file_is_too_long(folder):
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for file in (ROOT / folder).rglob("*.py")
    }
    assert lengths
    assert not {file: lines for file, lines in lengths.items() if lines > MAX_LINES}

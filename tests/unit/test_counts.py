"""What must stay small: flags, words of documentation, code, the engine, files."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

import vllm_kvevict
from vllm_kvevict.settings.config import EvictionConfig

PACKAGE = Path(vllm_kvevict.__file__).parent
ROOT = PACKAGE.parent


def lines(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.rglob("*.py"))


def code_lines(text: str) -> int:
    """Lines that hold code: neither empty, nor comment, nor part of a docstring.

    Docstrings of attributes count as docstrings, other strings over several lines as code.
    """
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*silent, tokenize.ENDMARKER):
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            held.difference_update(range(value.lineno, value.end_lineno + 1))
    return len(held)


def test_lines_of_code_are_counted():
    text = '"""One.\n\nTwo."""\n\n# Why.\na = 1  # Here.\n"""Of a."""\nb = """\nc\n"""\n'
    assert code_lines(text) == 4


def test_code_of_the_package():
    """Not ``wc``'s count, which also has docstrings, comments and empty lines."""
    assert sum(code_lines(file.read_text()) for file in PACKAGE.rglob("*.py")) <= 20000


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

"""Blocks and commands that the documentation shows."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").glob("*.md")),
]
PROGRAMS = (
    *("make", "pip", "vllm", "vllm-kvevict", "python", "docker", "helm", "serve", "git", "source"),
    *("curl", "kubectl", ".venv/bin/python", ".venv-dist/bin/twine", "benchmarks/gpu/run.sh"),
)
"""What the lines of a block of commands begin with, behind variables that they set."""

ASSIGNED = re.compile(r"^(?:[A-Z_]+=(?:\"[^\"]*\"|[^\s(]+) )+")
SUBSTITUTED = re.compile(r"^[A-Z]+=\$\(")
HEREDOC = re.compile(r"<<'(\w+)'[^\n]*\n(.*?)\n\1$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """A piece of a page: a block's text, or one command, on one line and without variables."""

    page: Path
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text}"


def blocks(page: Path) -> list[str]:
    """Fenced blocks, and runs of lines indented by four behind an empty line."""
    found: list[str] = []
    text = page.read_text()
    for fenced in re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        found.append(fenced.rstrip())
    text = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for indented in re.findall(r"(?<=\n\n)((?:(?: {4}.*)?\n)+)", text + "\n"):
        if indented.strip():
            found.append(re.sub(r"^ {4}", "", indented, flags=re.MULTILINE).strip("\n"))
    return found


def is_commands(block: str) -> bool:
    first = ASSIGNED.sub("", block.split("\n", 1)[0])
    return SUBSTITUTED.match(first) is not None or first.partition(" ")[0] in PROGRAMS


def of_block(block: str) -> list[str]:
    """Its commands, one a line: without comments, texts that they read and variables."""
    lines = HEREDOC.sub("", block).replace("\\\n", " ").split("\n")
    found = []
    for line in lines:
        line = SUBSTITUTED.sub("", re.sub(r"\s+#.*$", "", line)).rstrip(")")
        for one in re.split(r" && | \| ", line):
            if one := ASSIGNED.sub("", " ".join(one.split())):
                found.append(one)
    return found


def in_prose(page: Path) -> list[str]:
    """What stands between backticks and begins with a program that people type."""
    typed = re.findall(
        r"`((?:make|python -m|vllm serve|vllm-kvevict|pip install) [^`]+)`", page.read_text()
    )
    return [" ".join(one.split()) for one in typed]


def commands() -> list[Shown]:
    """Every command of every page, once a page."""
    found: dict[Shown, None] = {}
    for page in PAGES:
        shown = [one for block in blocks(page) if is_commands(block) for one in of_block(block)]
        found |= dict.fromkeys(Shown(page, one) for one in shown + in_prose(page))
    return list(found)


def other_blocks() -> list[Shown]:
    """Every block that is no commands."""
    return [Shown(page, one) for page in PAGES for one in blocks(page) if not is_commands(one)]

"""The table of what vLLM can be asked for: ``table.toml``, which says what becomes of each name."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "table.toml"

STATES = ("works", "refused", "no_effect", "unknown")


class Entry(NamedTuple):
    """Some names of one kind with one state.

    Args:
        kind: Of :data:`dev.features.walk.KINDS`.
        what: The subject.
        names: What it covers.
        state: One of :data:`STATES`.
        reason: The test that runs it, words of the sentence that refuses it, or why it has no
            effect.
        since: First version of vLLM that has these names; empty for all.
        dev: True for routes that vLLM serves in its dev mode alone.

    """

    kind: str
    what: str
    names: tuple[str, ...]
    state: str
    reason: str
    since: str = ""
    dev: bool = False

    def is_in(self, version: str) -> bool:
        """Return True if a version of vLLM has these names."""
        return not self.since or _numbers(version) >= _numbers(self.since)


def entries(file: Path = FILE) -> list[Entry]:
    """Read the table.

    Raises:
        ValueError: An entry has no state, or several.

    """
    return [
        _entry(kind, one)
        for kind, table in tomllib.loads(file.read_text()).items()
        for one in table
    ]


def _entry(kind: str, one: dict[str, str]) -> Entry:
    states = [state for state in STATES if state in one]
    if len(states) != 1:
        raise ValueError(f"{kind}: {one['what']}: one of {', '.join(STATES)}, not {states}")
    (state,) = states
    return Entry(
        kind,
        one["what"],
        tuple(_names(kind, one["names"])),
        state,
        one[state],
        one.get("since", ""),
        bool(one.get("dev", False)),
    )


def _names(kind: str, text: str) -> Iterator[str]:
    for line in filter(None, map(str.strip, text.splitlines())):
        if kind == "config":
            owner, _, fields = line.partition(":")
            yield from (f"{owner}.{field}" for field in fields.split())
        elif kind == "route":
            yield line
        else:
            yield from line.split()


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]

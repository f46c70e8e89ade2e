"""`make results`: the list has every result file, and its commands parse."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import repeat
from benchmarks.repeat import Run
from tests.unit.test_snippets import ours, python

LISTED = repeat.read_list()
FILES = [name for result in LISTED.results for name in result.files]


def test_every_file_of_the_page_is_measured_or_has_a_reason() -> None:
    """Files of docs/results.md, and no other files."""
    listed = [*FILES, *LISTED.not_repeated]
    assert sorted(listed) == sorted(repeat.pages()) and len(listed) > 40
    folder = {path.name for path in repeat.RESULTS.iterdir()}
    assert set(listed) == folder


def test_names_are_unique() -> None:
    names = [result.name for result in LISTED.results]
    assert len(set(names)) == len(names)
    assert all(result.minutes > 0 for result in LISTED.results)


COMMANDS = {one.name: one.command for one in LISTED.results} | {
    name: one.command for name, one in LISTED.prepared.items()
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_parses(name: str, registered: Any) -> None:
    """With the paths that a run puts into it, and it writes what the entry says."""
    run = Run(LISTED, "abcdef0", Path("work"))
    values = run.values(name)
    words = shlex.split(COMMANDS[name].format(**values))
    {"python": python, "vllm-kvevict": ours}[words[0]](words[1:])
    for result in LISTED.results:
        if result.name == name:
            assert f"{values['out']}/{name}.json" in words

"""Prints the names of vLLM that the table lacks: ``python -m dev.features --vllm FOLDER``.

Nothing of any vLLM is imported or run.
"""

import argparse
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from dev.features.page import written
from dev.features.table import Entry, entries
from dev.features.walk import KINDS
from dev.hooks.source import Source

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def problems(source: Source, table: list[Entry], kinds: Iterable[str] = KINDS) -> list[str]:
    """Return what is wrong with the table for a vLLM: names that it lacks, has twice or invents."""
    found, version = [], source.version
    for kind in kinds:
        here = [one for one in table if one.kind == kind and one.is_in(version)]
        named = [name for one in here for name in one.names]
        there = KINDS[kind](source)
        found += [f"{kind}: {name} is in no entry" for name in sorted(there - set(named))]
        found += [f"{kind}: {name} is not in vLLM {version}" for name in sorted({*named} - there)]
        twice = sorted({name for name in named if named.count(name) > 1})
        found += [f"{kind}: {name} is in two entries" for name in twice]
    return found + [f"{one.kind}: {one.what} is unknown" for one in table if one.state == "unknown"]


def main(argv: list[str]) -> int:
    """Print what is wrong, and write the page if asked; 1 where the table does not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m dev.features",
        description="Compare dev/features/table.toml with what a vLLM can be asked for.",
    )
    parser.add_argument(
        "--vllm",
        action="append",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="The package `vllm` of another version; may be repeated.",
    )
    parser.add_argument(
        "--write", action="store_true", help="Write the table's part of docs/compatibility.md."
    )
    args = parser.parse_args(argv)
    installed, table = find_spec("vllm"), entries()
    roots = [Path(installed.origin).parent] if installed and installed.origin else []
    wrong = [line for root in (*roots, *args.vllm) for line in problems(Source(root), table)]
    if args.write:
        PAGE.write_text(written(PAGE.read_text(), table))
    print("\n".join([*wrong, f"{sum(len(one.names) for one in table)} names, {len(wrong)} wrong"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

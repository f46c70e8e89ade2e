"""Which hooks a vLLM breaks, and where each is: ``python -m dev.hooks --vllm FOLDER``.

Nothing of any vLLM is imported or run.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from dev.hooks.check import hooks, problem
from dev.hooks.source import Source

OTHER = "-"
"""In the place of a line, where the hook is another version's."""


def table(sources: list[Source]) -> list[list[str]]:
    """A row for each hook, under a row of titles: our file, vLLM's name, its place in each vLLM.

    A place is a file below the folder ``vllm`` and a line; a problem follows in parentheses, or
    stands there alone where there is no such name.
    """
    rows = [["ours", "name", *(f"vllm {source.version}" for source in sources)]]
    for hook in hooks():
        cells = []
        for source in sources:
            found = source.find(hook.module, hook.name) if hook.applies(source.version) else None
            wrong = problem(source, hook) if hook.applies(source.version) else OTHER
            place = source.place(found) if found is not None else ""
            cells.append(f"{place} ({wrong})" if place and wrong else wrong or place)
        rows.append([hook.user, str(hook), *cells])
    return rows


def main(argv: list[str]) -> int:
    """Write the table, or print it; 1 where a hook does not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m dev.hooks",
        description="Look for every name of vLLM's that this plugin touches, in its source.",
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
        "--write", type=Path, metavar="FILE", help="Write the table there; print what is wrong."
    )
    args = parser.parse_args(argv)
    installed = find_spec("vllm")
    roots = [Path(installed.origin).parent] if installed and installed.origin else []
    for root in (given := args.vllm):
        if not (root / "__init__.py").is_file():
            parser.error(f"{root} is no package `vllm`")
    title, *rows = table([Source(root) for root in (*roots, *given)])
    wrong = [row for row in rows if any(c == "missing" or c.endswith(")") for c in row[2:])]
    lines = ["\t".join(row) for row in (title, *rows)]
    if args.write is not None:
        args.write.write_text("\n".join(lines) + "\n")
        lines = ["\t".join(row) for row in wrong]
    print("\n".join([*lines, f"{len(rows)} hooks, {len(wrong)} of them wrong"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

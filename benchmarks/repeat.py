"""`make results`: measure the files of benchmarks/results anew, as repeat.toml lists them.

    make results                            results of commits before HEAD, and missing ones
    make results REPEAT="--list"            every result: state, expected minutes and page
    make results REPEAT="--only chat --since f62ebef"

A result is up to date if the commit in its files is that of ``--since`` (HEAD) or a later one. All
other results are measured one after another, which takes hours. A run that was stopped goes on
where it stopped, because finished results name the commit. Nothing but benchmarks/results may
differ from the commit. Tables, JSON, logs and journals are in .cache/results/COMMIT; the published
files are copied to benchmarks/results.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / ".cache" / "results"
IDLE = 0.5
"""Load average up to which the machine counts as quiet."""

PROGRAMS: dict[str, list[str]] = {"python": [], "vllm-kvevict": ["-m", "vllm_kvevict"]}
"""First words of commands, and the arguments of Python by which each is replaced."""

COMMIT = re.compile(r"\bcommit\"?:? \"?([0-9a-f]{7,40})\b")
"""How result files name the commit that they were measured with."""


class RepeatError(RuntimeError):
    """Nothing can be measured. The message is one sentence."""


@dataclass(frozen=True)
class Result:
    """An entry of the list.

    Args:
        files: Names in benchmarks/results that the command writes.
        command: The command, with ``{out}``, ``{work}`` and names of :class:`Prepared` in it.
        minutes: Rough estimate of its duration.
        quiet: Whether the command measures times, so that no other work may run.

    """

    files: tuple[str, ...]
    command: str
    minutes: float
    quiet: bool = False

    @property
    def name(self) -> str:
        """The name for ``--only``: that of the first file, without its suffix."""
        return Path(self.files[0]).stem


@dataclass(frozen=True)
class Prepared:
    """A model or a profile that commands read: its path, and the command that makes it."""

    path: str
    command: str


@dataclass(frozen=True)
class Listed:
    """The whole list: results, what they need by name, and reasons for files without an entry."""

    results: tuple[Result, ...]
    prepared: dict[str, Prepared]
    not_repeated: dict[str, str]


def read_list(path: Path = LIST) -> Listed:
    """Return the list of a file like benchmarks/repeat.toml."""
    data = tomllib.loads(path.read_text())
    results = [Result(**{**entry, "files": tuple(entry["files"])}) for entry in data["result"]]
    prepared = {name: Prepared(**entry) for name, entry in data["prepared"].items()}
    return Listed(tuple(results), prepared, data["not_repeated"])


def pages() -> dict[str, str]:
    """Return the page that shows each file, as the table of docs/results.md has it."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| [") and "(../benchmarks/results/" in line:
            files, *_, page = (cell.strip() for cell in line.strip("| ").split(" | "))
            ((title, target),) = re.findall(r"^\[(.*?)\]\((.*?)\)$", page)
            title = PAGE.stem if target.startswith("#") else title
            found |= dict.fromkeys(re.findall(r"benchmarks/results/([^)]+)", files), title)
    return found


def git(*words: str) -> subprocess.CompletedProcess[str]:
    """Run git in the repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def clean_commit() -> str:
    """Return the abbreviated commit of a tree without other changes than results.

    Raises:
        RepeatError: There is no repository, or a tracked file outside benchmarks/results differs.

    """
    head = git("rev-parse", "--short", "HEAD").stdout.strip()
    if not head:
        raise RepeatError("results are measured in a git checkout")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".",
                  ":!benchmarks/results")  # fmt: skip
    if changed.stdout:
        raise RepeatError(
            f"results name a commit, so commit or stash first:\n{changed.stdout.rstrip()}"
        )
    return head


def state(result: Result, since: str) -> str:
    """Return "up to date", "missing", or the commit of the oldest file, before ``since``."""
    for name in result.files:
        path = RESULTS / name
        if not path.exists():
            return "missing"
        if path.suffix == ".png":
            continue
        (commit, *_) = COMMIT.findall(path.read_text()) or [""]
        if not commit or git("merge-base", "--is-ancestor", since, commit).returncode:
            return f"of {commit}" if commit else "of no commit"
    return "up to date"


def words_of(command: str, values: dict[str, str]) -> list[str]:
    """Return a command as words for ``subprocess``, with this Python's interpreter.

    Raises:
        RepeatError: The command runs another program than those of :data:`PROGRAMS`.

    """
    first, *rest = (word.format(**values) for word in shlex.split(command))
    if first not in PROGRAMS:
        raise RepeatError(f"{LIST.name}: {first} is none of {', '.join(PROGRAMS)}")
    return [sys.executable, *PROGRAMS[first], *rest]


class Run:
    """Runs entries of the list on one commit.

    Args:
        listed: The list.
        commit: Of the clean tree.
        work: Folder that takes what is not published; ``.cache/results`` by default.

    """

    def __init__(self, listed: Listed, commit: str, work: Path | None = None) -> None:
        self.listed = listed
        self.out = (WORK if work is None else work) / commit
        self._env = dict(os.environ, KVEVICT_COMMIT=commit, VLLM_NO_USAGE_STATS="1")
        # Files name their command, so paths are those of a checkout.
        self._values = {"out": os.path.relpath(self.out, ROOT)}
        for name, one in listed.prepared.items():
            self._values[name] = one.path.format(**self._values)

    def values(self, name: str) -> dict[str, str]:
        """Return what stands for names in braces in the command of an entry."""
        return {**self._values, "work": str(self.out / "work" / name)}

    def measure(self, result: Result) -> str | None:
        """Measure a result and publish its files.

        Returns:
            None, or one sentence that says what failed.

        """
        for name, one in self.listed.prepared.items():
            needed = f"{{{name}}}" in result.command
            if needed and (failed := self._prepare(name, one)):
                return failed
        values = self.values(result.name)
        Path(values["work"]).mkdir(parents=True, exist_ok=True)
        if failed := self._call(result.name, words_of(result.command, values)):
            return failed
        if missing := [name for name in result.files if not (self.out / name).exists()]:
            return f"{result.name}: the command wrote no {', '.join(missing)}"
        for name in result.files:
            shutil.copy(self.out / name, RESULTS / name)
        return None

    def _prepare(self, name: str, one: Prepared) -> str | None:
        # A profile needs its model first.
        for other, needed in self.listed.prepared.items():
            read = other != name and f"{{{other}}}" in one.command
            if read and (failed := self._prepare(other, needed)):
                return failed
        if (ROOT / self._values[name]).exists():
            return None
        return self._call(name, words_of(one.command, self._values))

    def _call(self, name: str, words: list[str]) -> str | None:
        self.out.mkdir(parents=True, exist_ok=True)
        log = self.out / f"{name}.log"
        with log.open("w") as file:
            done = subprocess.run(
                words, cwd=ROOT, env=self._env, stdout=file, stderr=subprocess.STDOUT
            )
        if done.returncode == 0:
            return None
        return f"{name}: exit status {done.returncode}, see {log.relative_to(ROOT)}"


def table(results: Iterable[Result], since: str, listed: Listed) -> str:
    """Return one line for each result, and one for each file that is not repeated."""
    shown = pages()
    lines = [f"{'result':<28}{'minutes':>8}  {'page':<15}state"]
    for one in results:
        quiet = "; needs a quiet machine" if one.quiet else ""
        page = shown.get(one.files[0], "")
        lines.append(f"{one.name:<28}{one.minutes:>8g}  {page:<15}{state(one, since)}{quiet}")
    for name, reason in listed.not_repeated.items():
        lines.append(f"{name:<28}{'-':>8}  {shown.get(name, ''):<15}not repeated: {reason}")
    return "\n".join(lines)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.repeat",
        description="Measure the files of benchmarks/results anew, on one clean commit.",
    )
    parser.add_argument("--list", action="store_true", help="only print the list and states")
    parser.add_argument("--only", action="append", metavar="NAME", help="may be given repeatedly")
    parser.add_argument("--since", default="HEAD", metavar="COMMIT",
                        help="results of this commit and later ones are up to date")  # fmt: skip
    return parser.parse_args(argv)


def chosen(listed: Listed, names: list[str] | None) -> list[Result]:
    """Return the entries with these names, or all of them.

    Raises:
        RepeatError: A name is in no entry.

    """
    known = {one.name: one for one in listed.results}
    if unknown := [name for name in names or () if name not in known]:
        raise RepeatError(f"--only: no result {', '.join(unknown)}; valid are {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _options(argv)
    listed = read_list()
    try:
        if git("cat-file", "-e", f"{options.since}^{{commit}}").returncode:
            raise RepeatError(f"--since: {options.since} is no commit of this repository")
        results = chosen(listed, options.only)
        if options.list:
            print(table(results, options.since, listed))
            return 0
        run = Run(listed, clean_commit())
    except RepeatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    failures = []
    left = [one for one in results if state(one, options.since) != "up to date"]
    with tqdm(total=sum(one.minutes for one in left), unit="min", disable=not left) as bar:
        for one in left:
            bar.set_description(one.name)
            if one.quiet and (load := os.getloadavg()[0]) > IDLE:
                bar.write(f"{one.name} measures times, and the load of this machine is {load:.1f}")
            began = time.monotonic()
            failed = run.measure(one)
            bar.write(failed or f"{one.name}: {(time.monotonic() - began) / 60:.0f} min")
            failures += [failed] if failed else []
            bar.update(one.minutes)
    print(f"{len(results) - len(left)} up to date, {len(left) - len(failures)} measured, "
          f"{len(failures)} failed")  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`make results`: the list has every result file, its commands parse, and runs go on."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import repeat
from benchmarks.repeat import Listed, Prepared, RepeatError, Result, Run, words_of
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


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a folder of results and one commit; the list measures in it."""
    root = tmp_path / "checkout"
    (root / "benchmarks" / "results").mkdir(parents=True)
    (root / "code.py").write_text("")
    (root / ".gitignore").write_text(".cache\n")
    monkeypatch.setattr(repeat, "ROOT", root)
    monkeypatch.setattr(repeat, "RESULTS", root / "benchmarks" / "results")
    monkeypatch.setattr(repeat, "WORK", root / ".cache" / "results")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.com")
    git("init", "-q")
    commit("first")
    return root


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=repeat.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(message: str) -> str:
    git("add", "-A")
    git("commit", "-q", "--allow-empty", "-m", message)
    return git("rev-parse", "--short", "HEAD")


def script(*lines: str) -> str:
    return f"python -c {shlex.quote('; '.join(lines))}"


WRITES = script(
    "import os, sys, pathlib",
    "where = pathlib.Path(sys.argv[1])",
    "text = pathlib.Path(sys.argv[2]).read_text()",
    "where.write_text('commit ' + os.environ['KVEVICT_COMMIT'] + ' ' + text)",
)
MAKES = script("import sys, pathlib", "pathlib.Path(sys.argv[1]).open('a').write('made')")
LIST = Listed(
    (
        Result(("one.md",), f"{WRITES} {{out}}/one.md {{profile}}", 1),
        Result(("two.md",), f"{WRITES} {{out}}/two.md {{model}}", 2, quiet=True),
        Result(("bad.md",), script("raise SystemExit(3)"), 1),
        Result(("none.md",), script("pass"), 1),
    ),
    {
        "model": Prepared("{out}/model", f"{MAKES} {{model}}"),
        "profile": Prepared("{out}/profile", f"{WRITES} {{profile}} {{model}}"),
    },
    {"old.md": "a reason"},
)


@pytest.fixture
def short(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list above instead of the repository's."""
    monkeypatch.setattr(repeat, "read_list", lambda: LIST)
    return checkout


def test_results_are_measured_once(short: Path, capsys: Any) -> None:
    """They name the commit, also while earlier results make the tree dirty; failures are named."""
    head = git("rev-parse", "--short", "HEAD")
    assert repeat.main([]) == 1
    printed = capsys.readouterr()
    assert "0 up to date, 2 measured, 2 failed" in printed.out
    shown = printed.out + printed.err
    assert f"bad: exit status 3, see .cache/results/{head}/bad.log" in shown
    assert "none: the command wrote no none.md" in shown
    one, two = ((repeat.RESULTS / f"{name}.md").read_text() for name in ("one", "two"))
    assert (one, two) == (f"commit {head} commit {head} made", f"commit {head} made")
    for name in ("one", "two"):
        (repeat.RESULTS / f"{name}.md").write_text(f"commit {head} kept")
    assert repeat.main(["--only", "one", "--only", "two"]) == 0
    assert "2 up to date, 0 measured, 0 failed" in capsys.readouterr().out
    assert (repeat.RESULTS / "one.md").read_text() == f"commit {head} kept"


def test_results_of_earlier_commits_are_measured_anew(short: Path, capsys: Any) -> None:
    first = git("rev-parse", "--short", "HEAD")
    assert repeat.main(["--only", "two"]) == 0
    second = commit("results")
    assert repeat.main(["--only", "two", "--since", first]) == 0
    assert first in (repeat.RESULTS / "two.md").read_text()
    capsys.readouterr()
    assert repeat.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["two", "2", "of", f"{first};", *"needs a quiet machine".split()]
    assert lines[1].split() == ["one", "1", "missing"] and lines[-1].endswith("repeated: a reason")
    assert repeat.main(["--only", "two"]) == 0
    assert second in (repeat.RESULTS / "two.md").read_text()
    assert git("status", "--porcelain") == "M benchmarks/results/two.md"
    assert repeat.main(["--only", "one"]) == 0


def test_what_is_refused(short: Path, capsys: Any) -> None:
    assert repeat.main(["--only", "three"]) == 1
    assert "no result three; valid are one, two, bad, none" in capsys.readouterr().err
    assert repeat.main(["--since", "0" * 40]) == 1
    assert "is no commit of this repository" in capsys.readouterr().err
    (short / "code.py").write_text("changed")
    assert repeat.main([]) == 1
    error = capsys.readouterr().err
    assert "commit or stash" in error and "code.py" in error
    assert not list(repeat.RESULTS.iterdir())


def test_programs_are_this_interpreters() -> None:
    assert words_of("vllm-kvevict plan {m} -x", {"m": "a b"}) == [
        sys.executable, "-m", "vllm_kvevict", "plan", "a b", "-x",
    ]  # fmt: skip
    with pytest.raises(RepeatError, match="rm"):
        words_of("rm {m}", {"m": "a"})

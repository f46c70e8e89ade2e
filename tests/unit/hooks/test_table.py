"""The table of places: what is committed is what the sources say, and a changed vLLM is seen."""

from pathlib import Path

import pytest
import vllm

import vllm_kvevict
from dev.hooks import overrides
from dev.hooks.__main__ import main, table
from dev.hooks.check import Hook, problem
from dev.hooks.source import Source

CHECKOUT = Path(vllm_kvevict.__file__).parents[1]
INSTALLED = f"vllm {vllm.__version__.partition('+')[0]}"
FETCHED = CHECKOUT / ".cache" / "vllm-source"
SOURCES = {f"vllm {one}": FETCHED / one / "vllm" for one in ("0.32.0", "0.33.0")}
SOURCES[INSTALLED] = Path(vllm.__file__).parent
TABLE = CHECKOUT / "docs" / "dev" / "vllm-hooks.tsv"
COMMITTED = [line.split("	") for line in TABLE.read_text().splitlines()]


@pytest.mark.parametrize("version", SOURCES)
def test_the_committed_table_is_what_the_source_says(version):
    """`make hooks` writes it."""
    if not SOURCES[version].is_dir():
        pytest.skip(f"no source of {version}: `make vllm-source` fetches it")
    column = COMMITTED[0].index(version)
    says = table([Source(SOURCES[version])])
    assert says == [[*row[:2], row[column]] for row in COMMITTED]


def test_lines_hold_the_names():
    """Read with no parser: the last part of a name stands in the line that the table gives."""
    looked_at = 0
    column = COMMITTED[0].index(INSTALLED)
    for row in COMMITTED[1:]:
        name, place = row[1], row[column]
        if place != "-":
            file, _, line = place.rpartition(":")
            lines = (SOURCES[INSTALLED] / file).read_text().splitlines()
            last = name.partition("(")[0].rpartition(".")[2]
            # A statement may go on: a decorated function, an import or an assignment in brackets.
            assert last in "".join(lines[int(line) - 1 : int(line) + 9]), name
            looked_at += 1
    assert looked_at > 400


VLLM = {
    "__init__.py": "",
    "_version.py": "__version__ = version = '0.33.1+cu130'\n",
    "base.py": """
from abc import ABC, abstractmethod
class Base(ABC):
    @abstractmethod
    def asked(self): ...
    @abstractmethod
    def given(self): ...
    @abstractmethod
    def filled(self): ...
class Stock(Base):
    def filled(self): ...
    def __init__(self):
        self.late = 1
    def taken(self, a, b, *, c=1): ...
    def more(self, a, b): ...
    def named(self, a, *, c): ...
""",
}

OURS = """
class Own(Stock):
    def given(self): ...
def taken(a, *others, c): ...
class Other(Mixin, Stock):
    def more(self, a): ...
    def named(self, a, *others): ...
"""


@pytest.fixture
def source(tmp_path, monkeypatch) -> Source:
    root = tmp_path / "vllm"
    root.mkdir()
    for name, text in VLLM.items():
        (root / name).write_text(text)
    (tmp_path / "ours.py").write_text(OURS)
    monkeypatch.setattr(overrides, "OURS", tmp_path)
    return Source(root)


@pytest.mark.parametrize(
    "hook, said",
    [
        (Hook("ours.py", "vllm.base", "Stock.taken", ("a",)), "ours lacks asked()"),
        (Hook("ours.py", "vllm.base", "Stock.more"), "ours lacks asked(), b"),
        (Hook("ours.py", "vllm.base", "Stock.named"), "ours lacks asked(), c"),
        (Hook("ours.py", "vllm.base", "Base.given"), None),
        (Hook("ours.py", "vllm.base", "Stock.gone"), "missing"),
        (Hook("ours.py", "vllm.base", "Stock.taken", ("x",)), "takes other parameters"),
    ],
    ids=str,
)
def test_says_what_is_wrong(source, hook, said):
    assert problem(source, hook) == said


def test_a_shim_is_one_versions(source):
    assert source.version == "0.33.1"
    assert Hook("compat/vllm_0_33.py", "", "").applies("0.33.1")
    assert not Hook("compat/vllm_0_32.py", "", "").applies("0.33.1")
    assert Hook("engine/scheduler.py", "", "").applies("")


def test_places(source):
    places = [
        source.place(found)
        for n in ("Stock", "Stock.late", "Stock.asked")
        if (found := source.find("vllm.base", n))
    ]
    assert places == ["base.py:10", "base.py:13", "base.py:5"]


def test_the_command(tmp_path, capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.endswith(" hooks, 0 of them wrong\n")
    with pytest.raises(SystemExit):
        main(["--vllm", str(tmp_path)])


def test_the_command_fails_where_something_is_missing(tmp_path, capsys):
    root = tmp_path / "vllm"
    root.mkdir()
    for name in ("__init__.py", "_version.py"):
        (root / name).write_text(VLLM[name])
    file = tmp_path / "table.tsv"
    assert main(["--vllm", str(root), "--write", str(file)]) == 1
    rows = [line.split("\t") for line in file.read_text().splitlines()]
    assert rows[0][-1] == "vllm 0.33.1"
    assert {row[-1] for row in rows[1:]} == {"missing", "-"}
    assert "_get_local_prefix_cache_hit" in capsys.readouterr().out

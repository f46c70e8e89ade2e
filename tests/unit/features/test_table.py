"""The table of vLLM's features: complete for each vLLM, and true where that can be looked up."""

import ast
import re
import shutil
from functools import cache
from pathlib import Path

import pytest

from dev.features.__main__ import PAGE, problems
from dev.features.page import written
from dev.features.table import Entry, entries
from dev.features.walk import KINDS
from dev.hooks.source import Source
from tests.unit.hooks.test_table import CHECKOUT, INSTALLED, SOURCES

TABLE = entries()
TESTS = CHECKOUT / "tests"


@pytest.mark.parametrize("version", SOURCES)
def test_every_name_is_in_one_entry(version):
    """Whoever adds a name reads what vLLM does with it, and says here what becomes of it."""
    if not SOURCES[version].is_dir():
        pytest.skip(f"no source of {version}: `make vllm-source` fetches it")
    assert problems(Source(SOURCES[version]), TABLE) == []


def test_there_are_as_many_as_vllm_has():
    found = {kind: len(walk(Source(SOURCES[INSTALLED]))) for kind, walk in KINDS.items()}
    least = dict(config=580, worker=55, core=40, client=60, route=75, request=230)
    assert all(found[kind] >= number for kind, number in least.items()), found


@cache
def functions(file: Path) -> set[str]:
    found = ast.walk(ast.parse(file.read_text()))
    return {one.name for one in found if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_what_works_names_a_test():
    named = {one.reason for one in TABLE if one.state == "works"}
    assert len(named) > 30
    missing = [
        name
        for name in named
        for file, _, test in [name.partition("::")]
        if not (TESTS / file).is_file() or test not in functions(TESTS / file)
    ]
    assert missing == []


def test_what_is_refused_names_words_of_a_sentence():
    words = {
        node.value
        for file in (CHECKOUT / "vllm_kvevict").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    refused = {one.reason for one in TABLE if one.state == "refused"}
    assert len(refused) > 20
    assert [one for one in refused if not any(one in sentence for sentence in words)] == []


def test_what_has_no_effect_says_why():
    reasons = [one.reason for one in TABLE if one.state == "no_effect"]
    assert len(reasons) > 20 and all(len(reason.split()) > 3 for reason in reasons)


def test_the_page_is_what_the_table_says():
    """`python -m dev.features --write` writes it."""
    assert written(PAGE.read_text(), TABLE) == PAGE.read_text()


def overlay(folder: Path, file: str, old: str, new: str) -> Source:
    """The installed vLLM with one change of one file."""
    root, made = SOURCES[INSTALLED], folder / "vllm"
    for part in [*reversed(Path(file).parents)]:
        (made / part).mkdir(parents=True, exist_ok=True)
        for one in (root / part).iterdir():
            place = made / part / one.name
            if Path(file).is_relative_to(part / one.name) or place.exists():
                continue
            if one.is_dir() and part.parts[:1] == ("entrypoints",):
                shutil.copytree(one, place, ignore=shutil.ignore_patterns("*.pyc", "static"))
            else:
                place.symlink_to(one)
    text = (root / file).read_text()
    assert text.count(old) == 1
    (made / file).write_text(text.replace(old, new + old))
    return Source(made)


NEW = {
    "config: SchedulerConfig.drops_blocks is in no entry": (
        "config/scheduler.py",
        "    max_num_active_seqs: int | None = Field(",
        "    drops_blocks: bool = False\n",
    ),
    "worker: drop_blocks is in no entry": (
        "v1/worker/gpu_worker.py",
        "    def discard(self, tags",
        "    def drop_blocks(self): ...\n\n",
    ),
    "core: drop_blocks is in no entry": (
        "v1/engine/core.py",
        "    def release_kv_cache_memory(self)",
        "    def drop_blocks(self): ...\n\n",
    ),
    "client: drop_blocks is in no entry": (
        "engine/protocol.py",
        "    async def release_kv_cache_memory(self)",
        "    async def drop_blocks(self): ...\n\n",
    ),
    "route: POST /drop_blocks is in no entry": (
        "entrypoints/serve/dev/sleep/api_router.py",
        '@router.post("/release_kv_cache_memory")',
        '@router.post("/drop_blocks")\nasync def drop_blocks(): ...\n\n\n',
    ),
    "request: drop_blocks_at is in no entry": (
        "sampling_params.py",
        "    skip_reading_prefix_cache: bool | None = None",
        "    drop_blocks_at: int | None = None\n",
    ),
    "request: DropRequest is in no entry": (
        "entrypoints/serve/lora/protocol.py",
        "class LoadLoRAAdapterRequest(BaseModel):",
        "class DropRequest(BaseModel):\n    lora_name: str\n\n\n",
    ),
}


@pytest.mark.parametrize("said", NEW)
def test_what_is_new_in_vllm_is_noticed(said, tmp_path):
    source = overlay(tmp_path, *NEW[said])
    kind = said.partition(":")[0]
    assert said in problems(source, TABLE, [kind])
    assert said not in problems(Source(SOURCES[INSTALLED]), TABLE, [kind])


def test_a_part_of_the_configuration_that_is_new_is_walked(tmp_path):
    source = overlay(
        tmp_path,
        "config/vllm.py",
        '@config(config=ConfigDict(arbitrary_types_allowed=True))\nclass VllmConfig:\n    """',
        "@config\nclass Dropping:\n    blocks: int = 0\n\n\n",
    )
    assert "config: Dropping.blocks is in no entry" in problems(source, TABLE, ["config"])


def test_an_unknown_state_is_a_failure():
    some = Entry("worker", "something", ("sleep",), "unknown", "nobody looked")
    assert "worker: something is unknown" in problems(Source(SOURCES[INSTALLED]), [some], [])


def test_names_that_are_gone_or_twice_are_noticed():
    twice = [*TABLE, Entry("worker", "more", ("sleep", "gone"), "no_effect", "")]
    found = problems(Source(SOURCES[INSTALLED]), twice, ["worker"])
    assert "worker: sleep is in two entries" in found
    assert any(line.startswith("worker: gone is not in vLLM") for line in found)


@pytest.mark.parametrize("states", ["", 'works = "a"\nrefused = "b"\n'], ids=["none", "two"])
def test_an_entry_has_one_state(states, tmp_path):
    file = tmp_path / "table.toml"
    file.write_text(f'[[worker]]\nwhat = "x"\nnames = "sleep"\n{states}')
    with pytest.raises(ValueError, match="worker: x: one of works, refused"):
        entries(file)


PAGES = [CHECKOUT / "README.md", *(CHECKOUT / "docs").rglob("*.md"), CHECKOUT / "deploy/README.md"]


def test_pages_say_which_routes_need_the_dev_mode():
    paths = [name.split()[1] for one in TABLE if one.dev for name in one.names]
    assert "/reset_prefix_cache" in paths
    route = re.compile(rf"(?:POST |GET |`)(?:{'|'.join(map(re.escape, paths))})\b")
    silent = [
        f"{page.name}: {text[:60]}"
        for page in PAGES
        for text in re.split(r"\n\n|\n(?=\|)|\n- ", page.read_text())
        if route.search(text) and "VLLM_SERVER_DEV_MODE" not in text
    ]
    assert silent == []

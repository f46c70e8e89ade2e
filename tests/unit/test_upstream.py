"""The patches of docs/upstream.md apply to the installed vLLM, in order, and do what it says."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "docs" / "upstream").glob("*.patch"))
INSTALLED = Path(vllm.__file__).parent


def files(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/vllm/(\S+)", patch.read_text(), re.MULTILINE)


def links_to(folder: Path, into: Path, copied: set[Path]) -> None:
    """A tree of links to a folder's files, in which some are copies."""
    into.mkdir()
    for entry in folder.iterdir():
        if entry in copied:
            shutil.copy(entry, into)
        elif any(entry in one.parents for one in copied):
            links_to(entry, into / entry.name, copied)
        elif entry.name != "__pycache__":
            (into / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> Path:
    """A folder in which ``vllm`` is the installed one with all patches."""
    root = tmp_path_factory.mktemp("upstream")
    links_to(INSTALLED, root / "vllm", {INSTALLED / name for p in PATCHES for name in files(p)})
    for patch in PATCHES:
        command = ["git", "apply", "--whitespace=error", str(patch)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, (patch.name, done.stderr)
    return root


def test_they_apply(patched):
    assert len(PATCHES) == 4
    for name in {name for patch in PATCHES for name in files(patch)}:
        text = (patched / "vllm" / name).read_text()
        ast.parse(text)
        assert text != (INSTALLED / name).read_text()


def test_each_is_described():
    page = (ROOT / "docs" / "upstream.md").read_text()
    assert all(f"upstream/{patch.name}" in page for patch in PATCHES)


@pytest.mark.nightly
@pytest.mark.slow
def test_what_they_add(patched):
    """In a process of its own, as this one has imported the installed vLLM."""
    paths = os.pathsep.join([str(patched), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.upstream_script"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip().endswith("upstream: all four"), done.stderr[-2000:]

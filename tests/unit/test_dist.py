"""`make dist` gives the same bytes from any copy of the sources; deploy/README.md names it."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import vllm_kvevict

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "csrc",
           "vllm_kvevict", "packaging/build_dist.py")  # fmt: skip
EPOCH = 1_700_000_000
WHEEL = f"vllm_kvevict-{vllm_kvevict.__version__}-py3-none-any.whl"


def copy_of_the_sources(folder: Path, mode: int, mtime: int) -> Path:
    """As another clone has them: other dates, other permissions, and leftovers."""
    for name in SOURCES:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            skip = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, target, ignore=skip)
        else:
            shutil.copy(ROOT / name, target)
    for file in [*folder.rglob("*.*")]:
        if file.is_file():
            file.chmod(mode)
            os.utime(file, (mtime, mtime))
    (folder / "vllm_kvevict" / "__pycache__").mkdir()
    (folder / "vllm_kvevict" / "__pycache__" / f"{mtime}.pyc").write_bytes(b"")
    return folder


def build(folder: Path, umask: int, epoch: int | None) -> dict[str, Path]:
    environment = {name: text for name, text in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    if epoch is not None:
        environment["SOURCE_DATE_EPOCH"] = str(epoch)
    command = [sys.executable, str(folder / "packaging" / "build_dist.py"), str(folder / "dist")]
    done = subprocess.run(
        command, env=environment, umask=umask, capture_output=True, text=True, cwd=folder.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {file.name: file for file in (folder / "dist").iterdir()}


@pytest.mark.nightly
@pytest.mark.slow
def test_two_clones_build_the_same_bytes(tmp_path: Path) -> None:
    here = build(copy_of_the_sources(tmp_path / "here", 0o644, 10**9), 0o022, EPOCH)
    there = build(copy_of_the_sources(tmp_path / "there", 0o600, 1_400_000_000), 0o077, EPOCH)
    assert here.keys() == there.keys() == {WHEEL, f"vllm_kvevict-{vllm_kvevict.__version__}.tar.gz"}
    for name, file in here.items():
        assert file.read_bytes() == there[name].read_bytes(), name
    with tarfile.open(next(file for name, file in here.items() if name.endswith(".gz"))) as sdist:
        assert {member.mtime for member in sdist} == {EPOCH}
        names = {member.name.partition("/")[2] for member in sdist}
    assert set(SOURCES[:5]) <= names and "csrc/build.py" in names


@pytest.mark.slow
def test_without_a_commit_or_a_date_it_is_1980(tmp_path: Path) -> None:
    made = build(copy_of_the_sources(tmp_path / "sources", 0o644, 10**9), 0o022, None)
    with zipfile.ZipFile(made[WHEEL]) as wheel:
        assert {entry.date_time[0] for entry in wheel.infolist()} == {1980}


def test_the_page_on_deployment_names_what_is_built() -> None:
    text = (ROOT / "deploy" / "README.md").read_text()
    assert re.findall(r"pip install dist/(\S+)", text) == [WHEEL]
    assert text.index("make dist") < text.index("pip install dist")

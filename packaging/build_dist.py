"""Builds sdist and wheel so that the same commit gives the same bytes: ``build_dist.py OUTDIR``.

Needs setuptools and wheel in this Python. SOURCE_DATE_EPOCH is the date of everything inside; by
default it is that of the commit. The wheel is built from the sdist, without compiled kernels.
"""

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTENTS = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "csrc",
            "vllm_kvevict")  # fmt: skip
OLDEST = 315532800
"""1980-01-01: no zip file can be older."""


def date_of_sources() -> int:
    """Seconds since 1970: SOURCE_DATE_EPOCH, else the commit's, else 1980."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return max(int(given), OLDEST)
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return OLDEST
    return int(subprocess.run(git, check=True, capture_output=True, text=True).stdout)


def call_backend(folder: Path, hook: str, target: Path) -> Path:
    """Run a hook of setuptools as an installer does."""
    code = (
        "import sys, setuptools.build_meta as backend; folder, name = sys.argv[1:];"
        f"made = backend.{hook}(folder); open(name, 'w').write(made)"
    )
    name = target / "name"
    command: Sequence[str] = [sys.executable, "-c", code, str(target), str(name)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    made = target / name.read_text().strip()
    name.unlink()
    return made


def repack(sdist: Path, date: int) -> None:
    """Write an sdist anew: members in order, one date, one owner, plain permissions."""
    with tarfile.open(sdist) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        contents = {m.name: archive.extractfile(m) if m.isfile() else None for m in members}
        with (
            sdist.with_suffix(".new").open("wb") as raw,
            gzip.GzipFile("", "wb", 9, raw, mtime=date) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as out,
        ):
            for member in members:
                member.mtime, member.uid, member.gid = date, 0, 0
                member.uname = member.gname = ""
                member.pax_headers = {}
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                out.addfile(member, contents[member.name])
    sdist.with_suffix(".new").replace(sdist)


def main(target: Path) -> None:
    os.umask(0o022)
    date = date_of_sources()
    os.environ |= {"SOURCE_DATE_EPOCH": str(date), "KVEVICT_CUDA": "0"}
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        skip = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
        for name in CONTENTS:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=skip)
            else:
                shutil.copy(ROOT / name, source)
        sdist = call_backend(source, "build_sdist", target.resolve())
        repack(sdist, date)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        unpacked = Path(folder) / sdist.name.removesuffix(".tar.gz")
        wheel = call_backend(unpacked, "build_wheel", target.resolve())
    print(sdist, wheel, sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

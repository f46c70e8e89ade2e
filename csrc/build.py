"""Compiles the extension with nvcc, for setup.py, ``make wheel`` and the tests.

Not torch.utils.cpp_extension: it refuses beside a CPU build of torch, whose headers are enough.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
TORCH_TARGET = "0x020b000000000000ULL"
"""The oldest torch that loads the extension: 2.11."""
FLAGS = ["-std=c++20", "-O3", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]


def find_nvcc() -> str | None:
    """nvcc of CUDA_HOME or of the PATH, or None."""
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc")


def architectures() -> tuple[str, ...]:
    """Compute capabilities to compile for: KVEVICT_CUDA_ARCHS ("90,100"), or all.

    Raises:
        ValueError: One is not supported.

    """
    chosen = os.environ.get("KVEVICT_CUDA_ARCHS")
    if not chosen:
        return ARCHITECTURES
    names = tuple(name.strip() for name in chosen.split(","))
    unknown = [name for name in names if name not in ARCHITECTURES]
    if unknown:
        raise ValueError(
            f"KVEVICT_CUDA_ARCHS: {', '.join(unknown)} is not among {', '.join(ARCHITECTURES)}"
        )
    return names


def compile_extension(
    nvcc: str, target: Path, folder: Path, archs: Sequence[str], jobs: int | None = None
) -> None:
    """Compile and link the extension.

    Args:
        nvcc: The compiler.
        target: The shared library to write.
        folder: For objects.
        archs: Compute capabilities, without the dot. PTX of the oldest and of the newest is added,
            from which drivers compile for every other GPU that is not older.
        jobs: Files at once; by default KVEVICT_JOBS or the number of cores.

    Raises:
        subprocess.CalledProcessError: nvcc failed; what it said is on stderr.

    """
    import torch

    root = Path(torch.__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    for arch in {min(archs, key=int), max(archs, key=int)}:
        codes.append(f"-gencode=arch=compute_{arch},code=compute_{arch}")
    include = ["-isystem", str(root / "include")]
    common = [nvcc, *FLAGS, "-lineinfo", "-Xcompiler=-fPIC,-fvisibility=hidden", *include]

    def compile_one(source: Path) -> Path:
        compiled = folder / f"{source.stem}.o"
        device = codes if source.suffix == ".cu" else []
        _run([*common, *device, "-c", str(source), "-o", str(compiled)])
        return compiled

    sources = sorted([*HERE.glob("*.cu"), *HERE.glob("*.cpp")], reverse=True)
    jobs = jobs or int(os.environ.get("KVEVICT_JOBS", 0)) or os.cpu_count() or 1
    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, sources))
    link = ["-shared", "-cudart=static", "-L", str(root / "lib"), "-ltorch_cpu", "-ldl"]
    _run([nvcc, *map(str, objects), *link, "-o", str(target)])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise subprocess.CalledProcessError(done.returncode, list(command))

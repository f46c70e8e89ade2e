"""Compiles csrc/ for the host, against ``cuda_emulation.h``."""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

from csrc.build import TORCH_TARGET

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CACHE = ROOT / ".cache" / "emulation"
FLAGS = "-O1 -std=c++20 -shared -fPIC -Wall -Werror -Wno-unknown-pragmas -DKVEVICT_EMULATE".split()
NAMESPACE = "vllm_kvevict_emulated"


def compiler() -> str | None:
    """Path of g++, or None."""
    return shutil.which("g++")


def build() -> Path:
    """The emulated extension, compiled once for a state of the sources."""
    sources = sorted([*(ROOT / "csrc").iterdir(), *HERE.glob("*.cpp"), *HERE.glob("*.h")])
    content = b"".join(path.read_bytes() for path in sources if path.is_file())
    content += " ".join([*FLAGS, TORCH_TARGET, torch.__version__]).encode()
    library = CACHE / f"{hashlib.sha256(content).hexdigest()[:24]}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            for old in CACHE.glob("*.so"):
                old.unlink()
            _compile(library)
    return library


def set_order(library: Path, reverse: bool) -> None:
    """In which order blocks run, and their threads between two barriers."""
    ctypes.CDLL(str(library)).kvevict_emulation_order(int(reverse))


def _compile(library: Path) -> None:
    compiler_path = compiler()
    assert compiler_path is not None, "no g++"
    torch_root = Path(torch.__file__).parent
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [compiler_path, *FLAGS, "-I", str(HERE), "-isystem", str(torch_root / "include")]
    command += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", str(HERE / "unity.cpp"), "-o"]
    command += [str(unfinished), "-L", str(torch_root / "lib"), "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    unfinished.rename(library)

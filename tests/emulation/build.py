"""Compiles csrc/ for the host, against ``cuda_emulation.h``."""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from csrc.build import TORCH_TARGET

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CACHE = ROOT / ".cache" / "emulation"
FLAGS = "-O1 -std=c++20 -Wall -Werror -Wno-unknown-pragmas -DKVEVICT_EMULATE".split()
# Leaks are not looked for: the search needs ptrace, which containers often forbid.
ASAN_OPTIONS = "detect_stack_use_after_return=0:detect_leaks=0:verify_asan_link_order=0"
NAMESPACE = "vllm_kvevict_emulated"


def compiler() -> str | None:
    """Path of g++, or None."""
    return shutil.which("g++")


def build() -> Path:
    """The emulated extension, compiled once for a state of the sources."""
    return _cached("extension.so", _compile)


def build_races(sanitizers: str) -> Path:
    """``races.cpp`` with sanitizers, as ``-fsanitize`` names them."""
    return _cached(f"races-{sanitizers.replace(',', '-')}", _compile_races, sanitizers)


def check_races() -> None:
    """Assert that ``races.cpp`` compiles, without making code."""
    _compile_races(Path(os.devnull), "thread", "-fsyntax-only")


@cache
def sanitizers_run(sanitizers: str) -> str:
    """Why nothing built with these sanitizers runs here, empty if it does."""
    with TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        source = ["-x", "c++", "-", f"-fsanitize={sanitizers}", "-o", str(program)]
        compiled = subprocess.run(
            [str(compiler()), *source], input="int main() {}", capture_output=True, text=True
        )
        if compiled.returncode:
            return compiled.stderr
        command = ["setarch", "-R", str(program)]
        options = os.environ | {"ASAN_OPTIONS": ASAN_OPTIONS}
        done = subprocess.run(command, capture_output=True, text=True, env=options)
        return done.stdout + done.stderr if done.returncode else ""


def set_order(library: Path, order: int) -> None:
    """How blocks run, and their threads between barriers: 0 forwards, 1 backwards, or a seed."""
    ctypes.CDLL(str(library)).kvevict_emulation_order(order)


def _cached(name: str, compile_it: Callable[..., None], *arguments: str) -> Path:
    """What ``compile_it(target, *arguments)`` makes of this state of the sources."""
    sources = sorted([*(ROOT / "csrc").iterdir(), *HERE.glob("*.cpp"), *HERE.glob("*.h")])
    content = b"".join(path.read_bytes() for path in sources if path.is_file())
    content += " ".join([*FLAGS, *arguments, TORCH_TARGET, torch.__version__]).encode()
    made = CACHE / f"{hashlib.sha256(content).hexdigest()[:24]}-{name}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"lock-{name}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file():
            # Names of builds begin with a digest, that of the lock does not.
            for old in CACHE.glob(f"{'[0-9a-f]' * 24}-{name}"):
                old.unlink()
            unfinished = made.with_suffix(f".{os.getpid()}")
            compile_it(unfinished, *arguments)
            unfinished.rename(made)
    return made


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    torch_options = ["-isystem", str(root / "include"), f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    link = ["-L", str(root / "lib"), "-ltorch_cpu", "-lc10"]
    _run([*FLAGS, "-shared", "-fPIC", *torch_options, str(HERE / "unity.cpp"), *link], target)


def _compile_races(target: Path, sanitizers: str, *more: str) -> None:
    # What TSan says of fences is about those of the standard library.
    options = [f"-fsanitize={sanitizers}", "-g", "-Wno-tsan", "-fno-sanitize-recover=all", *more]
    _run([*FLAGS, *options, "-I", str(ROOT / "csrc"), str(HERE / "races.cpp")], target)


def _run(arguments: Sequence[str], target: Path) -> None:
    path = compiler()
    assert path is not None, "no g++"
    command = [path, "-I", str(HERE), *arguments, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Compiles the extension with nvcc, for setup.py, ``make wheel`` and the tests.

It does not use torch.utils.cpp_extension, which refuses to build with a CPU build of torch,
although the headers of one suffice. Nothing here imports torch: pip's isolated builds cannot.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
OLDEST_NVCC = (12, 0)
"""The first nvcc that compiles C++20."""
PLACES = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda", "/usr/lib/cuda")
"""Folders of CUDA toolkits, where neither CUDA_HOME nor PATH names one; newer versions first."""
TORCH_TARGET = "0x020b000000000000ULL"
"""The oldest torch that loads the extension: 2.11."""
FLAGS = ["-std=c++20", "-O3", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]


def find_nvcc() -> str | None:
    """Return nvcc of CUDA_HOME, of CUDA_PATH, of PATH, of a usual folder, or of pip's package."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return str(Path(home) / "bin" / "nvcc")
    if found := shutil.which("nvcc"):
        return found
    folders = [folder for place in PLACES for folder in _newest_first(place)]
    for site in site_packages():
        folders += sorted(site.glob("nvidia/cu[0-9]*"), reverse=True)
        folders.append(site / "nvidia" / "cuda_nvcc")
    candidates = (folder / "bin" / "nvcc" for folder in folders)
    return next((str(nvcc) for nvcc in candidates if nvcc.is_file()), None)


def _newest_first(place: str) -> list[Path]:
    folders = Path("/").glob(place.removeprefix("/"))
    return sorted(folders, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)], reverse=True)


def site_packages() -> Iterator[Path]:
    """Yield the folders of packages of the environment that is installed into.

    In pip's isolated builds Python does not look into them. Other installers build in an
    environment of their own and name the one that they install into in VIRTUAL_ENV.
    """
    paths = sysconfig.get_paths()
    yield from dict.fromkeys(Path(paths[name]) for name in ("platlib", "purelib"))
    if environment := os.environ.get("VIRTUAL_ENV"):
        yield from Path(environment).glob("lib/python3*/site-packages")


def find_torch() -> Path | None:
    """Return the folder of torch: the one that imports, or that of the environment; or None."""
    for entry in map(Path, sys.path):
        if (entry / "torch" / "version.py").is_file():
            return entry / "torch"
    found = (site / "torch" for site in site_packages())
    return next((torch for torch in found if (torch / "version.py").is_file()), None)


def torch_versions(torch: Path) -> tuple[str, str | None]:
    """Return the version of torch and that of its CUDA, which is None for other builds."""
    values: dict[str, str | None] = {}
    for line in (torch / "version.py").read_text().splitlines():
        if match := re.match(r"(__version__|cuda)\b[^=]*= *(?:'([^']*)'|None)", line):
            values[match[1]] = match[2]
    return values["__version__"] or "", values.get("cuda")


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """Return the version of CUDA of a compiler.

    Raises:
        ValueError: It does not run, or does not name its version.

    """
    said = _output([nvcc, "--version"])
    match = re.search(r"release (\d+)\.(\d+)", said)
    if match is None:
        raise ValueError(f"{nvcc} --version names no release: {said.strip() or 'no output'}")
    return int(match[1]), int(match[2])


def architectures(nvcc: str) -> tuple[str, ...]:
    """Return the compute capabilities to compile for.

    Without KVEVICT_CUDA_ARCHS ("90,100") these are all that the compiler knows.

    Args:
        nvcc: The compiler.

    Raises:
        ValueError: KVEVICT_CUDA_ARCHS names one that the kernels or the compiler do not support,
            or the compiler supports none.

    """
    chosen, served = os.environ.get("KVEVICT_CUDA_ARCHS"), ", ".join(ARCHITECTURES)
    names = ARCHITECTURES
    if chosen:
        names = tuple(name.strip() for name in chosen.split(","))
        if unknown := [name for name in names if name not in ARCHITECTURES]:
            raise ValueError(f"KVEVICT_CUDA_ARCHS: {', '.join(unknown)} is not among {served}")
    known = re.findall(r"compute_(\d+)\b", _output([nvcc, "--list-gpu-arch"]))
    able = tuple(name for name in names if name in known)
    if not able or (chosen and able != names):
        missing = ", ".join(name for name in names if name not in known)
        possible = ", ".join(name for name in ARCHITECTURES if name in known) or "none"
        raise ValueError(
            f"KVEVICT_CUDA_ARCHS: {nvcc} does not compile for compute capability {missing}; of "
            f"{served} it serves {possible}"
        )
    return able


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
        FileNotFoundError: There is no torch.

    """
    root = find_torch()
    if root is None:
        raise FileNotFoundError("the extension needs the headers of torch")
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


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout
    except OSError as error:
        raise ValueError(f"{command[0]} does not run ({error})") from None

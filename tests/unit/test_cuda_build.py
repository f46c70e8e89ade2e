"""nvcc compiles csrc/ for one GPU (all with KVEVICT_TEST_ALL_ARCHS=1), the result loads beside a
CPU build of torch, and setup.py says why it leaves the extension out."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from triton import knobs

from csrc import build
from csrc.build import (
    ARCHITECTURES,
    architectures,
    compile_extension,
    find_nvcc,
    nvcc_version,
    torch_versions,
)
from vllm_kvevict.ops.cuda.fakes import OPERATIONS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ALL = os.environ.get("KVEVICT_TEST_ALL_ARCHS") == "1"
LOADED = """
import sys, torch
torch.ops.load_library(sys.argv[1])
names = [n for n in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")]
print(*sorted(n.split("::")[1] for n in names if n.startswith("vllm_kvevict::")))
ops = torch.ops.vllm_kvevict
print(ops.cuda_built(), ops.cuda_driver(), ops.cuda_serves())
tensors = [torch.zeros(1)] * 6
try:
    torch.ops.vllm_kvevict.select(*tensors, 16)
except NotImplementedError as error:
    print("refused:", str(error).splitlines()[0])
"""


@pytest.mark.nightly
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_nvcc_compiles_what_torch_loads(tmp_path: Path) -> None:
    nvcc = find_nvcc()
    assert nvcc is not None
    chosen = ARCHITECTURES if ALL else ("90",)
    library = tmp_path / "_C.abi3.so"
    compile_extension(nvcc, library, tmp_path / "objects", chosen)
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(library)], capture_output=True, text=True, check=True
    )
    registered, versions, refused = done.stdout.splitlines()
    built, driver, serves = map(int, versions.split())
    assert serves <= driver  # no GPU, no kernels for it
    assert built >= 12000 and (driver == 0 or driver >= 11000)
    assert registered.split() == sorted(OPERATIONS)
    assert "vllm_kvevict::select" in refused and "'CPU' backend" in refused
    if not ALL:
        check_budgets(library)
        check_loads_in_flight(library)


def check_budgets(library: Path) -> None:
    """Two blocks of score and of probe's keys share a multiprocessor, six of networks, others more;
    nothing to speak of is spilled."""
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(library)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", said)
    score = [part for part in found if re.search("(peak|column|lse)_kernel", part[0])]
    probe = [part for part in found if "probe_key_kernel" in part[0]]
    networks = [part for part in found if "network_kernel" in part[0]]
    # 3 types, 5 head sizes, 3 passes; 5 types, 1 or 2 parts, prose or none; 65536 registers, 256
    # threads.
    assert len(score) == 45 and len(probe) == 20 and len(networks) == 5 and len(found) > 80
    for name, registers, stack in found:
        part = (name, registers, stack)
        most = 128 if part in [*score, *probe] else 80 if part in networks else 64
        assert int(registers) <= most, name
        assert int(stack) <= 16, name


def check_loads_in_flight(library: Path) -> None:
    """A thread asks for several keys before it counts or moves the first."""
    command = [knobs.nvidia.cuobjdump.path, "-sass", str(library)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    checked = set()
    for part in said.split("Function : ")[1:]:
        found = re.search(r"\d(sort|select|norm|probe_key)_kernel", part.partition("\n")[0])
        if found is None:
            continue
        use = "SHFL" if found[1] in ("norm", "probe_key") else "MATCH"
        order = re.findall(rf"(?m)^\s+/\*\w{{4,5}}\*/ +(?:@\S+ )?(LDG|{use}|STG|ATOMS|BAR)\b", part)
        runs = re.findall(f"((?:LDG )+){use}", " ".join(order))
        assert max(map(len, runs)) // len("LDG ") >= 8, found[1]
        checked.add(found[1])
    assert checked == {"sort", "select", "norm", "probe_key"}


NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {release}, V{release}.1" ;;
--list-gpu-arch) for arch in {archs}; do echo "compute_$arch"; done ;;
*) echo "nvcc fatal: {fault}" >&2; exit 1 ;;
esac
"""


def fake_nvcc(folder: Path, release: str = "12.4", archs: str = "75 80 86 89 90") -> Path:
    """A compiler that knows some architectures and compiles nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(NVCC.format(release=release, archs=archs, fault="unsupported value"))
    nvcc.chmod(0o755)
    return nvcc


def run_setup(
    folder: Path, cuda: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``setup.py build_ext`` on a machine whose PATH is empty but for what is given.

    ``cuda`` is the version of CUDA that torch says it was built with.
    """
    code = (
        "import csrc.build as build, sys, runpy; build.PLACES = ();"
        "build.site_packages = lambda: iter(());"
        f"known = build.torch_versions; build.torch_versions = lambda t: (known(t)[0], {cuda!r});"
        f"sys.argv = ['setup.py', 'build_ext', '--build-lib', {str(folder / 'lib')!r},"
        f"'--build-temp', {str(folder / 'temp')!r}]; runpy.run_path('setup.py')"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": str(folder)} | environment,
        capture_output=True,
        text=True,
    )


def test_without_nvcc_one_line_says_so(tmp_path: Path) -> None:
    done = run_setup(tmp_path)
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if "CUDA extension" in line]
    assert said == [
        "vllm-kvevict: the CUDA extension is not built: nvcc was not found (set CUDA_HOME to a "
        "CUDA toolkit)"
    ]
    assert not (tmp_path / "lib").exists()


def test_demanded_but_impossible_is_an_error(tmp_path: Path) -> None:
    done = run_setup(tmp_path, KVEVICT_CUDA="1")
    assert done.returncode != 0
    assert "KVEVICT_CUDA=1, but nvcc was not found" in done.stderr


def test_a_cpu_build_of_torch_is_a_reason(tmp_path: Path) -> None:
    fake_nvcc(tmp_path)
    done = run_setup(tmp_path)
    assert done.returncode == 0
    assert "is built without CUDA" in done.stderr and not (tmp_path / "lib").exists()


def test_an_nvcc_without_c_plus_plus_20_is_a_reason(tmp_path: Path) -> None:
    fake_nvcc(tmp_path, release="11.8")
    done = run_setup(tmp_path, cuda="11.8")
    assert done.returncode == 0
    assert "nvcc is of CUDA 11.8, and 12.0 is the oldest" in done.stderr


def test_an_older_nvcc_compiles_for_the_gpus_that_it_knows(tmp_path: Path) -> None:
    """And if it fails, the message names what to set."""
    fake_nvcc(tmp_path)
    done = run_setup(tmp_path, cuda="12.4")
    assert "compiling the CUDA extension for 80, 86, 89, 90 with " in done.stderr
    assert done.returncode != 0 and "nvcc fatal: unsupported value" in done.stderr
    last = done.stderr.splitlines()[-1]
    for words in ("KVEVICT_CUDA_ARCHS=90", "CUDA_HOME", "KVEVICT_CUDA=0", "80, 86, 89, 90"):
        assert words in last
    assert "Traceback" not in done.stderr


def test_gpus_that_were_asked_for_must_be_known(tmp_path: Path) -> None:
    fake_nvcc(tmp_path)
    done = run_setup(tmp_path, cuda="12.4", KVEVICT_CUDA_ARCHS="90,100")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith(
        "nvcc does not compile for compute capability 100; of 80, 86, 89, 90, 100, 120 it serves "
        "80, 86, 89, 90"
    )
    assert "vllm-kvevict: KVEVICT_CUDA_ARCHS: " in done.stderr


def test_architectures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new = str(fake_nvcc(tmp_path / "new", archs="75 80 86 87 88 89 90 100 103 110 120 121"))
    old = str(fake_nvcc(tmp_path / "old"))
    monkeypatch.delenv("KVEVICT_CUDA_ARCHS", raising=False)
    assert architectures(new) == ARCHITECTURES
    assert architectures(old) == ("80", "86", "89", "90")
    monkeypatch.setenv("KVEVICT_CUDA_ARCHS", "90, 100")
    assert architectures(new) == ("90", "100")
    monkeypatch.setenv("KVEVICT_CUDA_ARCHS", "90,75")
    with pytest.raises(ValueError, match=r"KVEVICT_CUDA_ARCHS: 75 is not among 80, 86"):
        architectures(new)
    monkeypatch.delenv("KVEVICT_CUDA_ARCHS")
    with pytest.raises(ValueError, match=r"KVEVICT_CUDA_ARCHS: .* it serves none"):
        architectures(str(fake_nvcc(tmp_path / "older", archs="60 70")))


def test_nvcc_is_found_in_the_usual_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "site_packages", lambda: iter([tmp_path / "site"]))
    monkeypatch.setattr(build, "PLACES", (f"{tmp_path}/cuda", f"{tmp_path}/cuda-*"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert find_nvcc() is None
    # From the last place to the first.
    folders = ["site/nvidia/cuda_nvcc/bin", "site/nvidia/cu13/bin", "cuda-12.9/bin",
               "cuda-12.10/bin", "cuda/bin", "bin", "path/bin", "home/bin"]  # fmt: skip
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    for folder in folders:
        nvcc = fake_nvcc(tmp_path / folder)
        assert find_nvcc() == str(nvcc)
    assert nvcc_version(str(nvcc)) == (12, 4)
    nvcc.write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match="names no release: no output"):
        nvcc_version(str(nvcc))
    nvcc.write_text("")
    with pytest.raises(ValueError, match="does not run"):
        nvcc_version(str(nvcc))


def test_an_isolated_build_finds_the_torch_that_is_installed() -> None:
    """pip runs the same Python without the packages of the environment."""
    code = (
        f"import sys; sys.path = [{str(ROOT)!r}] + [p for p in sys.path if 'packages' not in p];"
        "import csrc.build as build; torch = build.find_torch(); print(torch);"
        "print(build.torch_versions(torch)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folder, version = done.stdout.split()
    assert Path(folder).resolve() == Path(torch.__file__).parent.resolve()
    assert version == torch.__version__


def test_the_version_of_torchs_cuda_is_read(tmp_path: Path) -> None:
    lines = (
        "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    (tmp_path / "version.py").write_text(lines)
    assert torch_versions(tmp_path) == ("2.13.0+cu130", "13.0")
    (tmp_path / "version.py").write_text(lines.replace("'13.0'", "None"))
    assert torch_versions(tmp_path) == ("2.13.0+cu130", None)


def test_an_environment_that_another_installer_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text("__version__ = '2.12.0'\ncuda = '12.9'\n")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict(platlib="/no/a", purelib="/no/b"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert build.find_torch() is None
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    found = build.find_torch()
    assert found == site / "torch" and torch_versions(found) == ("2.12.0", "12.9")

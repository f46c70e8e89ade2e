"""nvcc compiles csrc/ for one GPU (all with KVEVICT_TEST_ALL_ARCHS=1), the result loads beside a
CPU build of torch, and setup.py says why it leaves the extension out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton import knobs

from csrc.build import ARCHITECTURES, architectures, compile_extension, find_nvcc
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
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc on the PATH or in CUDA_HOME")
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
    """Two blocks of score and of probe's keys share a multiprocessor, others more; nothing to speak
    of is spilled."""
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(library)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", said)
    score = [part for part in found if re.search("(peak|column|lse)_kernel", part[0])]
    probe = [part for part in found if "probe_key_kernel" in part[0]]
    # 3 types, 5 head sizes, 3 passes; 5 types, 1 or 2 parts, prose or none; 65536 registers, 256
    # threads.
    assert len(score) == 45 and len(probe) == 20 and len(found) > 75
    for name, registers, stack in found:
        large = (name, registers, stack) in [*score, *probe]
        assert int(registers) <= (128 if large else 64), name
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


def run_setup(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """``setup.py build_ext`` on a machine whose PATH is empty but for what is given."""
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder / "lib")],
        cwd=ROOT,
        env={"PATH": str(folder)} | environment,
        capture_output=True,
        text=True,
    )


def test_without_nvcc_one_line_says_so(tmp_path: Path) -> None:
    done = run_setup(tmp_path)
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if "CUDA extension" in line]
    assert said == ["vllm-kvevict: the CUDA extension is not built: nvcc was not found"]
    assert not (tmp_path / "lib").exists()


def test_demanded_but_impossible_is_an_error(tmp_path: Path) -> None:
    done = run_setup(tmp_path, KVEVICT_CUDA="1")
    assert done.returncode != 0
    assert "KVEVICT_CUDA=1, but nvcc was not found" in done.stderr


def test_a_cpu_build_of_torch_is_a_reason(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA")
    (tmp_path / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nvcc").chmod(0o755)
    done = run_setup(tmp_path)
    assert done.returncode == 0
    assert f"torch {torch.__version__} is built without CUDA" in done.stderr


def test_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVEVICT_CUDA_ARCHS", raising=False)
    assert architectures() == ARCHITECTURES
    monkeypatch.setenv("KVEVICT_CUDA_ARCHS", "90, 100")
    assert architectures() == ("90", "100")
    monkeypatch.setenv("KVEVICT_CUDA_ARCHS", "90,75")
    with pytest.raises(ValueError, match=r"KVEVICT_CUDA_ARCHS: 75 is not among 80, 86"):
        architectures()

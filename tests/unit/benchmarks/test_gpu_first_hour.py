"""A dry run of the first hour on a GPU: each command of every part, up to its first device call."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import part, serving
from benchmarks.gpu.jobs import services
from benchmarks.gpu.model import LLAMA_8B
from benchmarks.quality.options import Options

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu" / "first_hour.sh"
MODULES = ["attention", "tune", "eviction", "smoke", "serving", "fp8"]
PARTS = ["unpack", "env", "tests", *MODULES, "needle", "sanitizer", "report"]


TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)


class Reached(Exception):
    """A part came to its first call of the device."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Logs of a dry run of all parts."""
    out = tmp_path_factory.mktemp("out")
    env = os.environ | dict(DRY="1", OUT=str(out), PYTHON="python3", MODEL=str(out))
    ended = subprocess.run(["bash", SCRIPT, *PARTS], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


def commands(folder: Path, name: str) -> list[list[str]]:
    """The commands of a part, as the shell would pass them."""
    return [shlex.split(line) for line in (folder / f"{name}.log").read_text().splitlines()]


def test_every_part_is_listed_and_ends(folder):
    ended = [line.split("\t") for line in (folder / "parts.tsv").read_text().splitlines()]
    assert [(name, status) for name, _, status in ended] == [(name, "0") for name in PARTS]
    listed = SCRIPT.read_text().partition("# Parts: ")[2].partition(".")[0]
    assert listed.split() == PARTS


@pytest.mark.parametrize("name", MODULES)
def test_a_measuring_part_reaches_the_device(name, folder, tmp_path, monkeypatch):
    """Its arguments are known, and its settings are complete: the file it would write is opened."""
    (command,) = commands(folder, name)
    assert command[:2] == ["python3", "-m"]
    module = importlib.import_module(command[2])
    arguments = command[3:]
    arguments[arguments.index("--output") + 1] = str(tmp_path / f"{name}.json")
    if command[2] == "benchmarks.gpu.serving":
        arguments += ["--tiny", "--scratch", str(tmp_path)]

    def describe(device):
        raise Reached

    monkeypatch.setattr(part, "describe", describe)
    monkeypatch.setattr(sys, "argv", [command[2], *arguments])
    with pytest.raises(Reached):
        module.main()


def test_fp8_servers_are_measured_with_and_without_eviction(folder):
    (command,) = commands(folder, "fp8")
    known = serving.parser().parse_args(command[3:])
    names = [one.name for one in services(known, LLAMA_8B)]
    assert set(known.only) <= set(names) and len(known.only) == 2
    assert known.serve_args.split("=") == ["--kv-cache-dtype", "fp8"]


def test_needles_are_sought_by_a_server_of_the_model(folder):
    (command,) = commands(folder, "needle")
    assert command[:3] == ["python3", "-m", "benchmarks.quality"]
    options = Options.parse(command[3:])
    assert options.model == str(folder) and options.output == folder / "needle.json"
    assert not options.kvpress and not options.like_for_like and options.resume


@pytest.mark.parametrize("name", ["tests", "sanitizer"])
def test_pytest_knows_the_arguments_and_finds_the_tests(name, folder):
    (command,) = commands(folder, name)
    arguments = command[command.index("pytest") + 1 :]
    asked = [sys.executable, "-m", "pytest", "--help", "--rootdir", str(folder), "-c", os.devnull]
    known = subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=60).stdout
    options = [argument for argument in arguments if argument.startswith("-")]
    assert len(options) >= 4 and all(f"  {option}" in known for option in options)
    assert arguments[arguments.index("-m") + 1] == "gpu"
    paths = [argument for argument in arguments if argument.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)
    if "-k" in arguments:
        word = arguments[arguments.index("-k") + 1]
        names = [name for path in paths for name in TEST.findall((ROOT / path).read_text())]
        assert any(word in name for name in names)


def test_the_environment_is_asked_by_a_program_that_compiles(folder):
    said = (folder / "env.log").read_text()
    _, program = said.split("python3 - \n")
    compile(program, "env", "exec")
    assert said.startswith("nvidia-smi --query-gpu") and "nvcc --version" in said
    imported = [line.split()[1] for line in program.splitlines() if line.startswith("from vllm_k")]
    assert imported and all(importlib.util.find_spec(name) for name in imported)

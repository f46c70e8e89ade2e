"""A dry run of the queue for a GPU machine: each command up to its first device call."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import part, real_weights, serving, transfers
from benchmarks.gpu.jobs import services
from benchmarks.gpu.model import LLAMA_8B
from benchmarks.gpu.transfers import QUEUE, Call

ROOT = Path(__file__).parents[3]
GPU = ROOT / "benchmarks" / "gpu"
MODULES = {
    "1_kernels": ["tune", "store_bits"],
    "2_admission": ["serving"],
    "3_models": ["real_weights"],
    "4_networks": ["eviction", "serving"],
}
PARTS = {
    "1_kernels": ["unpack", "networks", "tests", "decode", "tune", "store_bits"],
    "2_admission": ["unpack", "serving"],
    "3_models": ["unpack", "model", "convert", "real_weights"],
    "4_networks": ["unpack", "eviction", "serving", "report"],
}
TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)


class Reached(Exception):
    """A part came to its first call of the device."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The logs of a dry run of all calls, by the commands that the machine gets."""
    out = tmp_path_factory.mktemp("out")
    env = os.environ | dict(DRY="1", OUT=str(out), PYTHON="python3", MODEL=str(out))
    for call in QUEUE:
        ended = subprocess.run(
            ["bash", "-c", call.command], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


def commands(folder: Path, call: str) -> dict[str, list[str]]:
    """The command of each part of a call, as the shell would pass it."""
    _, *parts = re.split(r"^== (.*)\n", (folder / f"{call}.log").read_text(), flags=re.MULTILINE)
    return {
        name: shlex.split(text.replace("$'", "'"))
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_part_of_every_call_ends(folder):
    ended = [line.split("\t") for line in (folder / "parts.tsv").read_text().splitlines()]
    wanted = [name for call in QUEUE for name in PARTS[call.script]]
    assert [(name, status) for name, _, status in ended] == [(name, "0") for name in wanted]
    assert [path.stem for path in sorted((GPU / "queue").iterdir())] == list(PARTS)


def test_few_files_come_back(folder):
    """A call writes its log, the times of its parts, and a file for each module."""
    for call in QUEUE:
        assert 2 + len(MODULES[call.script]) <= 8
    assert len(list(folder.iterdir())) == len(QUEUE) + 1


@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, names in MODULES.items() for name in names]
)
def test_a_measuring_part_reaches_the_device(call, name, folder, tmp_path, monkeypatch):
    """Its arguments are known, and its settings are complete: the file it would write is opened."""
    command = commands(folder, call)[name]
    assert command[:3] == ["python3", "-m", f"benchmarks.gpu.{name}"]
    module, arguments = importlib.import_module(command[2]), command[3:]
    arguments[arguments.index("--output") + 1] = str(tmp_path / f"{name}.json")
    if name == "serving":
        arguments += ["--tiny", "--scratch", str(tmp_path)]

    def describe(device):
        raise Reached

    monkeypatch.setattr(part, "describe", describe)
    monkeypatch.setattr(sys, "argv", [command[2], *arguments])
    with pytest.raises(Reached):
        module.main()


def test_the_servers_that_are_asked_for_exist_and_fit(folder):
    for call, wanted, before in (("2_admission", 2, 5), ("4_networks", 1, 25)):
        command = commands(folder, call)["serving"]
        args = serving.parser().parse_args(command[3:])
        found = {one.name: one for one in services(args, LLAMA_8B)}
        assert set(args.only) <= set(found) and len(args.only) == wanted
        loads = [job.load for name in args.only for job in found[name].jobs if job.load]
        assert all(load.num_prompts >= 96 and len(set(load.outputs())) > 48 for load in loads)
        needed = sum(job.seconds for name in args.only for job in found[name].jobs)
        allowed = next(one.seconds for one in QUEUE if one.script == call) - 5
        assert before + args.start + needed < allowed, "else it would not even begin"
    assert "2048" in found["8x-6000-steps-2048"].eviction


@pytest.mark.parametrize("name", ["networks", "tests", "decode"])
def test_pytest_knows_the_arguments_and_finds_the_tests(name, folder):
    command = commands(folder, "1_kernels")[name]
    arguments = command[command.index("pytest") + 1 :]
    asked = [sys.executable, "-m", "pytest", "--help", "--rootdir", str(folder), "-c", os.devnull]
    known = subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=60).stdout
    options = [argument for argument in arguments if argument.startswith("-")]
    assert len(options) >= 4 and all(f"  {option}" in known for option in options)
    assert arguments[arguments.index("-m") + 1] == "gpu"
    paths = [argument for argument in arguments if argument.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)
    if "-k" in arguments:
        words = arguments[arguments.index("-k") + 1].split(" or ")
        text = "".join((ROOT / path).read_text() for path in paths)
        text += (ROOT / "tests" / "kernels" / "probe.py").read_text() if name == "networks" else ""
        assert all(word in text for word in words)


def test_the_model_is_converted_by_a_program_that_compiles(folder):
    command = commands(folder, "3_models")["convert"]
    program = command[command.index("-c") + 1].replace("\\n", "\n")
    compile(program, "convert", "exec")
    assert "benchmarks.gguf_llama" in program


def test_transfers_are_checked(tmp_path):
    """Too many bytes, too long a command, and folders that nobody prepared."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").write_bytes(bytes(1000))
    call = Call("1_kernels", 100, ("one",))
    assert transfers.problems(call, tmp_path, transfers.MOST_BYTES - 1000) == []
    (wrong,) = transfers.problems(call, tmp_path, transfers.MOST_BYTES - 999)
    assert "67,108,865 bytes" in wrong
    (wrong,) = transfers.problems(Call("1_kernels", 100, ("two",)), tmp_path, 0)
    assert "two is missing" in wrong and "prepare.sh" in wrong
    (wrong,) = transfers.problems(Call("x" * 2000, 100), tmp_path, 0)
    assert "characters" in wrong


def test_the_queue_without_its_bundle_is_within_the_limits():
    tree = transfers.tree_bytes()
    assert 2**20 < tree < 8 * 2**20, "the bundle of vLLM's packages needs the rest"
    for call in QUEUE:
        assert len(call.command) < 2000 and len(call.carried) <= 8
        missing = [f"{call.script}: {name} is missing" for name in call.carried]
        found = transfers.problems(call, ROOT / "nowhere", tree)
        assert [one.partition(":")[0] for one in found] == [call.script] * len(missing)
    assert sum(call.seconds for call in QUEUE) <= 700


def test_answers_are_compared_up_to_a_near_tie():
    reference = [
        {"tokens": ["a", "b", "c"], "margins": [2.0, 0.1, 3.0]},
        {"tokens": ["d", "e", "f"], "margins": [2.0, 1.0, 3.0]},
        {"tokens": ["g"], "margins": [0.2]},
    ]
    mine = [{"tokens": list(tokens)} for tokens in ("axx", "dxf", "x")]
    assert real_weights.compared(mine, reference) == {
        "answers": 3, "as the reference": 2, "tokens": 4, "equal": 2,
    }  # fmt: skip
    texts = real_weights.prompts()
    assert len(set(texts)) == real_weights.PROMPTS and min(map(len, texts)) > 1500
    assert json.dumps(texts) == json.dumps(real_weights.prompts()), "the same on every machine"

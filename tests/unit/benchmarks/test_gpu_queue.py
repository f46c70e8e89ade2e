"""A dry run of the queue for a GPU machine: each command up to its first device call."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import part, real_weights, serving, transfers, tune
from benchmarks.gpu.jobs import services
from benchmarks.gpu.model import LLAMA_8B
from benchmarks.gpu.transfers import QUEUE, Call
from benchmarks.server import ServerFailed
from tests.unit.benchmarks.fake_server import FakeServer

ROOT = Path(__file__).parents[3]
GPU = ROOT / "benchmarks" / "gpu"
MODULES = {
    "1_kernels": ["store_bits", "tune"],
    "2_admission": ["serving"],
    "3_models": ["real_weights"],
    "4_networks": ["eviction", "serving"],
}
PARTS = {
    "1_kernels": ["unpack", "tests", "store_bits", "tune"],
    "2_admission": ["unpack", "serving"],
    "3_models": ["unpack", "model", "convert", "real_weights"],
    "4_networks": ["unpack", "eviction", "serving", "report"],
}
BEFORE_SERVING_S = {"2_admission": 5, "4_networks": 25}
"""Seconds of a call before its part with servers, estimates."""


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
    """A call writes its log, the times of its parts, a file for each module, and two reports."""
    for call in QUEUE:
        assert 2 + len(MODULES[call.script]) + 2 * ("report" in PARTS[call.script]) <= 8
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
    for call, wanted in (("2_admission", 2), ("4_networks", 1)):
        command = commands(folder, call)["serving"]
        args = serving.parser().parse_args(command[3:])
        found = {one.name: one for one in services(args, LLAMA_8B)}
        assert set(args.only) <= set(found) and len(args.only) == wanted
        loads = [job.load for name in args.only for job in found[name].jobs if job.load]
        assert all(load.num_prompts >= 96 and len(set(load.outputs())) > 48 for load in loads)
        needed = sum(job.seconds for name in args.only for job in found[name].jobs)
        before = BEFORE_SERVING_S[call]
        assert before + args.start + needed < allowed(call), "else it would not even begin"
    assert "2048" in found["8x-6000-steps-2048"].eviction


UNPACK_S, MODEL_S, IMPORT_S = 25, 15, 8
"""Estimates: of the archives, of the model in call 3, and of what a part imports."""


def allowed(call: str) -> int:
    """Seconds of a call in which parts run."""
    return next(one.seconds for one in QUEUE if one.script == call) - 5


def estimates(
    call: str, name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Return the seconds that a part estimates for its rows when it checks whether they fit."""
    command = commands(folder, call)[name]
    module, arguments = importlib.import_module(command[2]), command[3:]
    arguments[arguments.index("--output") + 1] = str(tmp_path / f"{name}.json")
    if name == "real_weights":
        (tmp_path / "reference.json").write_text("{}")
        arguments[arguments.index("--reference") + 1] = str(tmp_path / "reference.json")
    needed: list[float] = []

    def fits(self: part.Part, seconds: float, *keys: part.Key) -> bool:
        needed.append(seconds)
        return False

    monkeypatch.setattr(part, "describe", lambda device: "a GPU")
    monkeypatch.setattr(part.Part, "fits", fits)
    monkeypatch.setattr(tune, "Tuned", lambda *args: SimpleNamespace(time=None))
    monkeypatch.setattr(sys, "argv", [command[2], *arguments])
    with pytest.raises(SystemExit):
        module.main()
    return needed


def test_the_rows_of_the_first_call_fit(folder, tmp_path, monkeypatch):
    """Tests take as long as their limit at most; what is tuned comes last."""
    script = (GPU / "queue" / "1_kernels.sh").read_text()
    (limit,) = re.findall(r"MOST=(\d+) part tests", script)
    stores = estimates("1_kernels", "store_bits", folder, tmp_path, monkeypatch)
    tuned = estimates("1_kernels", "tune", folder, tmp_path, monkeypatch)
    assert len(stores) == 4 and len(tuned) == 8 * 2 * 2 * 2
    rows = IMPORT_S + sum(stores) + IMPORT_S + sum(tuned)
    assert UNPACK_S + int(limit) + rows < allowed("1_kernels")


def test_the_servers_of_real_weights_fit(folder, tmp_path, monkeypatch):
    (together,) = estimates("3_models", "real_weights", folder, tmp_path, monkeypatch)
    assert together > 2 * real_weights.START_S, "all four"
    assert MODEL_S + IMPORT_S + together < allowed("3_models")


def test_the_eviction_of_the_last_call_leaves_time_for_its_server(folder, tmp_path, monkeypatch):
    (needed,) = estimates("4_networks", "eviction", folder, tmp_path, monkeypatch)
    assert IMPORT_S + needed <= BEFORE_SERVING_S["4_networks"]


def test_servers_of_real_weights_start_together(tmp_path, monkeypatch):
    """Each of them is asked, and one that fails does not stop the others."""
    monkeypatch.setattr(part, "provenance", lambda: dict(commit="c", versions={}, machine="m"))
    began: list[tuple[str, list[str]]] = []
    every = threading.Barrier(4)

    class Running(FakeServer):
        def __enter__(self):
            began.append((self.log.stem, self.flags))
            every.wait(30)
            if "25%" in self.log.stem and "12" not in self.log.stem:
                raise ServerFailed("no memory")
            self.log.write_text("KV eviction runs CUDA kernels for probe")
            return self

        def metric(self, name):
            return 0.0 if "full" in self.log.stem else 24.0

    said = [{"tokens": ["a", "b"], "margins": [2.0, 1.0]}] * 24
    monkeypatch.setattr(real_weights, "Server", Running)
    monkeypatch.setattr(real_weights, "ask", lambda server: said)
    reference = {name: {"answers": said} for name in real_weights.SETTINGS}
    (tmp_path / "reference.json").write_text(json.dumps(reference))
    output = tmp_path / "real_weights.json"
    options = f"--model M --reference {tmp_path}/reference.json --scratch {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["real_weights", *options.split(), "--output", str(output)])
    with pytest.raises(SystemExit, match="1 rows failed"):
        real_weights.main()
    found = {row["setting"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(found) == ["profile", "full", "25%", "12.5%"]
    assert "no memory" in found["25%"]["error"]
    for name in ("profile", "full", "12.5%"):
        assert found[name]["equal"] == 48 and found[name]["as the reference"] == 24
    for _, flags in began:
        assert flags[flags.index("--gpu-memory-utilization") + 1] == "0.23"
        assert "--kv-cache-memory-bytes" in flags


@pytest.fixture
def machine(tmp_path) -> Any:
    """A copy of the scripts, on a machine on which the archives were unpacked."""
    copied = tmp_path / "benchmarks" / "gpu"
    shutil.copytree(GPU / "queue", copied / "queue")
    shutil.copy(GPU / "parts.sh", copied)
    (tmp_path / "vllm_kvevict" / "ops" / "cuda").mkdir(parents=True)
    site = tmp_path / "site"
    site.mkdir()
    for name in ("commit", "_C.abi3.so"):
        (site / name).write_text("c")
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\necho "$@"\nwhile (($#)) && [[ $1 != --output ]]; do shift; done\n'
        'if (($#)); then echo "$MARK" >>"$2"; fi\n'
    )
    python.chmod(0o755)

    def run(script: str, mark: str) -> Path:
        out = tmp_path / mark
        env = os.environ | dict(
            OUT=str(out), SITE=str(site), PYTHON=str(python), MARK=mark,
            EARLIER=str(tmp_path / "earlier"),
        )  # fmt: skip
        env.pop("DRY", None)
        subprocess.run(
            ["bash", str(copied / "queue" / script)], env=env, check=False, capture_output=True
        )
        return out

    return SimpleNamespace(run=run, folder=tmp_path, queue=copied / "queue")


def test_a_call_continues_what_earlier_calls_measured(machine):
    """On a held machine, where each call has an empty folder for its results."""
    (machine.folder / "earlier").mkdir()
    (machine.folder / "earlier" / "serving-1.json").write_text("of other settings\n")
    second = machine.run("2_admission.sh", "second")
    assert (second / "serving.json").read_text() == "second\n"
    fourth = machine.run("4_networks.sh", "fourth")
    assert (fourth / "serving.json").read_text() == "second\nfourth\n"
    assert (fourth / "serving-1.json").exists() and (fourth / "eviction.json").exists()
    kept = {path.name: path.read_text() for path in (machine.folder / "earlier").iterdir()}
    assert kept == {
        "serving.json": "second\nfourth\n", "serving-1.json": "of other settings\n",
        "eviction.json": "fourth\n",
    }  # fmt: skip
    asked = f"-m benchmarks.gpu.report {fourth} {machine.folder / 'earlier'}"
    assert asked in (fourth / "4_networks.log").read_text()


def test_the_servers_of_two_calls_fill_one_file(folder, tmp_path, monkeypatch):
    """Their other commands choose rows, or say where and when these are measured."""
    monkeypatch.setattr(part, "provenance", lambda: dict(commit="c", versions={}, machine="m"))
    for call in ("2_admission", "4_networks"):
        args = serving.parser().parse_args(commands(folder, call)["serving"][3:])
        args.output = tmp_path / "serving.json"
        made = part.Part("serving", args, torch.device("cpu"), choice=serving.CHOICE)
        made.add(dict(setting=call), {})
    assert [row["setting"] for row in made.rows] == ["2_admission", "4_networks"]


def test_a_part_with_a_limit_leaves_time_for_the_others(machine):
    (machine.queue / "limits.sh").write_text(
        'source "$(dirname "$0")/../parts.sh"\nbegin 100\n'
        "MOST=1 part slow sleep 60\npart next sleep 1.5\nended\n"
    )
    out = machine.run("limits.sh", "limits")
    lines = [line.split("\t") for line in (out / "parts.tsv").read_text().splitlines()]
    assert [(name, status) for name, _, status in lines] == [("slow", "124"), ("next", "0")]


def test_pytest_knows_the_arguments_and_finds_the_tests(folder):
    command = commands(folder, "1_kernels")["tests"]
    arguments = command[command.index("pytest") + 1 :]
    asked = [sys.executable, "-m", "pytest", "--help", "--rootdir", str(folder), "-c", os.devnull]
    known = subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=60).stdout
    options = [argument for argument in arguments if argument.startswith("-")]
    assert len(options) >= 4 and all(f"  {option}" in known for option in options)
    assert arguments[arguments.index("-m") + 1] == "gpu"
    paths = [argument for argument in arguments if argument.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)
    words = set(re.findall(r"\w+", arguments[arguments.index("-k") + 1])) - {"and", "or"}
    files = [ROOT / path for path in (*paths, "tests/kernels/probe.py")]
    text = " ".join(path.stem + path.read_text() for path in files)
    assert len(words) > 4 and all(word in text for word in words)


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


def test_the_queue_with_the_usual_bundle_is_within_the_limits():
    tree = transfers.tree_bytes()
    assert tree > 2**20
    for call in QUEUE:
        size = tree + sum(transfers.PREPARED[name] for name in call.carried)
        assert size <= 67_108_864, f"{call.script}: what prepare.sh makes needs the rest"
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

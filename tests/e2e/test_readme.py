"""README's commands: what they name is there, and at night they run as they are written."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server import Server
from benchmarks.smollm2 import ModelUnavailable, real_model
from tests.snippets import ROOT, blocks, of_block

MODEL_COMMANDS = [one for block in blocks(ROOT / "README.md") for one in of_block(block)]


def words(program: str) -> list[str]:
    """The only command of README that begins so."""
    found = [shlex.split(one) for one in MODEL_COMMANDS if one.startswith(program)]
    assert len(found) == 1, program
    return found[0]


def test_files_and_targets_are_there() -> None:
    """``.venv`` is what ``make demo`` makes first."""
    makefile = (ROOT / "Makefile").read_text()
    paths = [word for one in MODEL_COMMANDS for word in shlex.split(one)[1:] if "/" in word]
    assert paths == [".venv/bin/activate"] * 2 + ["examples/questions.jsonl"]
    assert (ROOT / paths[-1]).is_file()
    assert re.search(r"^demo: setup$", makefile, re.MULTILINE)
    order = [one.split()[0] for one in MODEL_COMMANDS]
    assert order.index("make") < order.index("source") < order.index("vllm")


@pytest.mark.nightly
def test_the_commands_run(tmp_path: Path) -> None:
    """In the order of the page, on the model that ships: calibrate, serve, measure."""
    try:
        model = real_model()
    except ModelUnavailable as error:
        pytest.skip(str(error))
    environment = os.environ | {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}

    def run(command: list[str], *more: str) -> str:
        command = [word.replace("MODEL", str(model)) for word in command]
        done = subprocess.run(
            [sys.executable, "-m", "vllm_kvevict", *command[1:], *more],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert "written " in run(words("vllm-kvevict calibrate"))
    _, _, name, *flags = words("vllm serve")
    assert name == "MODEL"
    with Server(model, flags, tmp_path / "log", env=environment) as server:
        log = server.log.read_text()
        assert "KV eviction is on: policy probe" in log and str(tmp_path / "cache") in log
        printed = run(words("vllm-kvevict measure"), "--base-url", server.url)
        assert server.evictions()["evictions"] >= 8 * 6
    rows = printed.splitlines()
    assert rows[1].split()[:2] == ["full", "cache"] and int(rows[1].split()[2]) >= 4
    assert rows[-1].startswith("Take --kv-eviction-budget")

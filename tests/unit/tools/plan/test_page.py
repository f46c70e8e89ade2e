"""The sizes that docs/eight-gpus.md shows are those that its commands print."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulate.model import write_config
from tests.snippets import ROOT, blocks, of_block
from vllm_kvevict.tools.plan.command import main

PAGE = ROOT / "docs" / "eight-gpus.md"
COMMANDS = [one for block in blocks(PAGE) for one in of_block(block) if " plan meta-llama/" in one]
ROWS = re.compile(
    r"^\| (weights|KV cache|eviction's|requests of|the same)[^|]*\|((?: [\d.]+ \|){3})$",
    re.MULTILINE,
)
BUFFERS = ("rings", "token_stats", "tables", "attention", "workspace")


def sizes(command: str, folder: Path, capsys: Any) -> dict[str, float]:
    """What a command prints, by the row of the table."""
    _, _, name, *flags = shlex.split(command)
    (size,) = re.findall(r"-(\d+b)-instruct$", name.lower())
    write_config(f"llama-3.1-{size}", folder)
    assert main([str(folder), *flags, "--json"]) == 0
    # vLLM logs to stdout here, in front of what the command prints.
    out = capsys.readouterr().out
    planned = json.loads(out[out.index("{\n") :])
    assert planned["eviction"]["policy"] == "probe"
    memory = planned["memory"]
    return {
        "weights": memory["weights"] / 2**30,
        "KV cache": memory["kv_cache"] / 2**30,
        "eviction's": sum(memory[f"eviction_{name}"] for name in BUFFERS) / 2**30,
        "requests of": planned["without"]["sequences"],
        "the same": planned["with_eviction"]["sequences"],
    }


@pytest.mark.slow
def test_the_table_is_what_the_commands_print(tmp_path: Path, capsys: Any) -> None:
    one, ranks = (sizes(command, tmp_path, capsys) for command in COMMANDS)
    # Eight replicas have eight times the requests; memory is that of a GPU.
    eight = {name: value * (8 if isinstance(value, int) else 1) for name, value in one.items()}
    shown = {
        name: list(map(float, re.findall(r"[\d.]+", row)))
        for name, row in ROWS.findall(PAGE.read_text())
    }
    assert shown == {name: [round(part[name], 2) for part in (one, eight, ranks)] for name in one}

"""kvpress's answers to the same prompts, from an environment of its own, through files."""

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from benchmarks.quality.budget import kept
from benchmarks.quality.cell import FULL, Cell
from benchmarks.quality.endpoint import Completion
from benchmarks.quality.prompt import Prompt

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-kvpress" / "bin" / "python"
PREFIX = "kvpress "
PRESSES = (
    "snapkv", "ada-snapkv", "streaming-llm", "critical-ada-snapkv", "expected-attention", "keydiff",
)  # fmt: skip
KVZIP = "kvzip"
"""A press that reads the context twice: asked for by name alone, because of what it costs."""
TRANSFORMERS_FULL = Cell("", f"{FULL} (transformers)", "")


class RequestedCell(BaseModel):
    """One compression: ``keep`` of ``point`` tokens per head; all of them for none."""

    press: str
    point: int
    keep: int


class RequestedPrompt(BaseModel):
    ids: list[int]
    max_tokens: int
    cells: list[RequestedCell]


class Request(BaseModel):
    """What kvpress is asked. ``check`` prompts are also answered by its context manager.

    ``model`` is a folder, ``dtype`` torch's name of a precision.
    """

    model: str
    dtype: str
    check: int
    settings: dict[str, float | int]
    prompts: list[RequestedPrompt]

    def key(self, index: int) -> str:
        """Names what is asked of a prompt: other settings or cells make another name."""
        asked = [self.model, self.dtype, self.settings, self.prompts[index].model_dump()]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


class Response(BaseModel):
    """A line of kvpress's answers: token ids of each cell of one prompt."""

    key: str
    versions: dict[str, str]
    answers: list[list[int]]


def baseline_cells(
    presses: Sequence[str], budgets: Sequence[str], scenarios: Sequence[str]
) -> list[Cell]:
    """Cells of kvpress: the full cache, and each press at each budget in each scenario."""
    return [
        TRANSFORMERS_FULL,
        *(
            Cell(scenario, PREFIX + press, budget)
            for scenario in scenarios
            for press in presses
            for budget in budgets
        ),
    ]


def request_cell(cell: Cell, prompt: Prompt, window: int, block_size: int) -> RequestedCell:
    """The compression that keeps as many tokens per head as the server's eviction does."""
    if cell == TRANSFORMERS_FULL:
        return RequestedCell(press=PRESSES[0], point=len(prompt.ids), keep=len(prompt.ids))
    point = prompt.point(cell.scenario)
    tokens = kept(cell.budget, point, window, block_size).tokens
    return RequestedCell(press=cell.label.removeprefix(PREFIX), point=point, keep=tokens)


def answer_with_kvpress(
    model: Path,
    prompts: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    window: int,
    block_size: int,
    max_tokens: int | None,
    dtype: str,
    folder: Path,
    processes: int,
    check: int,
    resume: bool = False,
    kernel: int = 5,
) -> tuple[dict[Cell, list[Completion]], dict[str, str]]:
    """Run ``benchmarks.quality.kvpress_run`` over files in ``folder``.

    Returns:
        Answers by cell in the order of the prompts, and the versions that gave them.

    Raises:
        RuntimeError: kvpress is not installed, failed, or disagrees with its own context manager.

    """
    if not PYTHON.exists():
        raise RuntimeError(f"{PYTHON} is missing: run `make setup-kvpress`, or give --no-kvpress")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    request = Request(
        model=str(Path(model).resolve()),
        dtype=dtype,
        check=min(check, len(prompts)),
        settings={"window": window, "kernel": kernel},
        prompts=[
            RequestedPrompt(
                ids=list(prompt.ids),
                max_tokens=max_tokens or prompt.sample.max_tokens,
                cells=[request_cell(cell, prompt, window, block_size) for cell in cells],
            )
            for prompt in prompts
        ],
    )
    folder.mkdir(parents=True, exist_ok=True)
    asked, answered = folder / "kvpress-request.json", folder / "kvpress-answers.jsonl"
    keys = [request.key(index) for index in range(len(prompts))]
    known = _read(answered) if resume else {}
    # Only what is kept is written again; further answers are appended as they come.
    answered.write_text("".join(found.model_dump_json() + "\n" for found in known.values()))
    missing = [index for index, key in enumerate(keys) if key not in known]
    if missing:
        named = [{"key": keys[i], **request.prompts[i].model_dump()} for i in missing]
        asked.write_text(json.dumps({**request.model_dump(), "prompts": named}))
        _run(asked, answered, min(processes, len(missing)))
        known = _read(answered)
    rows = [known[key].answers for key in keys]
    answers = {
        cell: [
            Completion(tokenizer.decode(row[index], skip_special_tokens=True), tuple(row[index]))
            for row in rows
        ]
        for index, cell in enumerate(cells)
    }
    return answers, known[keys[0]].versions


def _read(path: Path) -> dict[str, Response]:
    """Answers by key; half a line, which a process that was killed leaves, counts for nothing."""
    lines = path.read_text().rpartition("\n")[0].split("\n") if path.exists() else []
    found = map(Response.model_validate_json, filter(None, lines))
    return {one.key: one for one in found}


def _run(asked: Path, answered: Path, processes: int) -> None:
    """Let each process answer its part; all are ended where one fails."""
    env, running = os.environ | {"OMP_NUM_THREADS": "1"}, []
    command = [PYTHON, "-m", "benchmarks.quality.kvpress_run", asked.resolve(), answered.resolve()]
    try:
        for part in range(processes):
            mine = [*command, "--part", f"{part}/{processes}"]
            running.append(subprocess.Popen(mine, cwd=ROOT, env=env))
        for process in running:
            if process.wait():
                raise RuntimeError(f"kvpress ended with status {process.returncode}, see above")
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()

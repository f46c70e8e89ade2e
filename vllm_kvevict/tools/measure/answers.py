"""Answers by cell, in a file that a second run goes on from."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vllm_kvevict.tools.measure.questions import Question

Cell = tuple[str, str]
"""Budget, and whether the question is known at the eviction."""


def run_id(questions: Sequence[Question], model: str, policy: str | None, max_tokens: int) -> str:
    """Return a digest of what answers depend on, besides the server and the cell."""
    asked = [asdict(one) for one in questions]
    value = json.dumps([asked, model, policy, max_tokens], sort_keys=True)
    return hashlib.sha256(value.encode()).hexdigest()[:16]


class Answers:
    """The finished cells of a run, each written when it is finished.

    Args:
        path: The file, as JSON Lines with ``run``, ``budget``, ``question``, ``index`` and
            ``answer``; None for none.
        run: Of :func:`run_id`.
        count: Number of questions.

    Raises:
        ValueError: In one sentence, that the file has something else in it.
        OSError: The file cannot be read or written.

    """

    def __init__(self, path: Path | None, run: str, count: int) -> None:
        self._path, self._run = path, run
        self.cells: dict[Cell, list[str]] = {}
        if path is None:
            return
        if path.exists():
            self._read(path, count)
        draft = path.with_name(f".{path.name}.draft")
        draft.write_text("".join(self._lines(cell) for cell in self.cells))
        os.replace(draft, path)

    def _read(self, path: Path, count: int) -> None:
        found: dict[Cell, dict[int, str]] = {}
        # A run that was killed may have left half a line.
        for number, line in enumerate(path.read_text().split("\n")[:-1], 1):
            try:
                row = json.loads(line)
                if row["run"] != self._run:
                    raise ValueError
                cell = str(row["budget"]), str(row["question"])
                found.setdefault(cell, {})[int(row["index"])] = str(row["answer"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"--output: line {number} of {path} is no answer to these questions by this "
                    "model with this --policy and --max-tokens; give another file, or remove it"
                ) from None
        for cell, answers in found.items():
            if sorted(answers) == list(range(count)):
                self.cells[cell] = [answers[index] for index in range(count)]

    def add(self, cell: Cell, answers: list[str]) -> None:
        """Write a finished cell."""
        self.cells[cell] = answers
        if self._path is not None:
            with self._path.open("a") as out:
                out.write(self._lines(cell))

    def _lines(self, cell: Cell) -> str:
        rows = (
            dict(run=self._run, budget=cell[0], question=cell[1], index=index, answer=answer)
            for index, answer in enumerate(self.cells[cell])
        )
        return "".join(json.dumps(row) + "\n" for row in rows)

"""Every answer of a run in plain text, for whoever wants to read or score them anew."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.quality.cell import Cell
from benchmarks.quality.endpoint import Completion
from benchmarks.quality.prompt import Prompt


def write_answers(
    prompts: Sequence[Prompt], answers: Mapping[Cell, Sequence[Completion]], path: Path
) -> None:
    """Write a JSON list, one entry a prompt; answers stand under ``scenario | label | budget``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "task": prompt.sample.task,
            "question": prompt.sample.question,
            "expected": prompt.sample.answers,
            "prompt_tokens": len(prompt.ids),
            "context_tokens": prompt.context,
            "answers": {
                " | ".join(filter(None, (cell.scenario, cell.label, cell.budget))): row[index].text
                for cell, row in answers.items()
            },
        }
        for index, prompt in enumerate(prompts)
    ]
    path.write_text(json.dumps(rows) + "\n")

"""Every answer of a run, for whoever wants to read or score them anew."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.quality.cell import Cell
from benchmarks.quality.endpoint import Completion
from benchmarks.quality.prompt import Prompt


def write_answers(
    prompts: Sequence[Prompt], answers: Mapping[Cell, Sequence[Completion]], path: Path
) -> None:
    """Write a JSON list, one entry a prompt.

    Under ``scenario | label | budget`` its ``answers`` hold the text, its ``tokens`` the ids.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {
        cell: " | ".join(filter(None, (cell.scenario, cell.label, cell.budget))) for cell in answers
    }
    rows = [
        {
            "task": prompt.sample.task,
            "question": prompt.sample.question,
            "expected": prompt.sample.answers,
            "prompt_tokens": len(prompt.ids),
            "context_tokens": prompt.context,
            "answers": {
                names[cell]: row[index].text for cell, row in answers.items() if index < len(row)
            },
            "tokens": {
                names[cell]: row[index].ids for cell, row in answers.items() if index < len(row)
            },
        }
        for index, prompt in enumerate(prompts)
    ]
    path.write_text(json.dumps(rows) + "\n")

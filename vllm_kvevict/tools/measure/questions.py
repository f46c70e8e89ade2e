"""Questions with known answers, as JSON Lines, and whether an answer is right."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUIRED = ("context", "question", "answer")


@dataclass(frozen=True)
class Question:
    """A question about a text.

    Args:
        context: The text, which comes first.
        question: The question, which follows the text after an empty line.
        answers: Texts that the answer must contain, all of them or any one, whatever their case.
        any_answer: True if one of the texts suffices.
        prefix: Opening of the answer, which the model continues; empty for none.
        max_tokens: Tokens of the answer; None for the command's default.

    """

    context: str
    question: str
    answers: tuple[str, ...]
    any_answer: bool = False
    prefix: str = ""
    max_tokens: int | None = None

    def is_right(self, answer: str) -> bool:
        """Return whether an answer contains what it must."""
        found = [one.lower() in answer.lower() for one in self.answers]
        return any(found) if self.any_answer else all(found)


def read(path: Path) -> list[Question]:
    """Read a file with one JSON object on each line.

    ``context``, ``question`` and ``answer`` (a text, or a list of which all must occur) are
    required; ``any_answer``, ``answer_prefix`` and ``max_new_tokens`` are optional.

    Raises:
        ValueError: In one sentence with the line's number, what is wrong.
        OSError: The file cannot be read.

    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        try:
            found.append(_question(row))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path} has no questions")
    return found


def _question(row: Any) -> Question:
    if not isinstance(row, dict):
        raise ValueError("a line must be a JSON object")
    if missing := [name for name in REQUIRED if name not in row]:
        raise ValueError(f"{', '.join(missing)} must be given")
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    if not answers or not all(str(one).strip() for one in answers):
        raise ValueError("answer must be a text or a list of texts, none of them empty")
    for name in ("context", "question"):
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"{name} must be a text that is not empty")
    tokens = row.get("max_new_tokens")
    if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
        raise ValueError("max_new_tokens must be a whole number of at least 1")
    return Question(
        row["context"],
        row["question"].strip(),
        tuple(map(str, answers)),
        bool(row.get("any_answer", "qa" in str(row.get("task", "")))),
        str(row.get("answer_prefix") or ""),
        tokens,
    )

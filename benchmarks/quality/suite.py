"""What is asked: the tasks of a suite, its samples, and the model it asks by default."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.quality import tasks as words
from benchmarks.quality.ruler import tasks as ruler
from benchmarks.smollm2 import real_model

TRAINED = Path(__file__).parent / "model"


class Sample(Protocol):
    """One question about a context, and what a right answer holds.

    The prompt is one user message, ``context``, a line break and ``question``. The model's answer
    begins with ``prefix`` and has at most ``max_tokens`` more tokens.
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]

    @property
    def prefix(self) -> str: ...
    @property
    def max_tokens(self) -> int: ...
    def score(self, text: str) -> float: ...


Count = Callable[[Any], int]
"""Tokens of the prompt that a sample becomes on the server."""


@dataclass(frozen=True)
class Suite:
    """Tasks by name; ``defaults`` are options that differ from those of the command line."""

    tasks: tuple[str, ...]
    model: Callable[[], Path]
    samples: Callable[[str, int, Sequence[int], Count], list[Sample]]
    """(task, length, seeds, count) to samples; what a length is in is the suite's."""
    defaults: dict[str, Any] = field(default_factory=dict)


def _ruler(task: str, length: int, seeds: Sequence[int], count: Count) -> list[Sample]:
    characters = ruler.characters_for(task, length, count)
    return [ruler.make(task, characters, seed) for seed in seeds]


def _words(task: str, length: int, seeds: Sequence[int], count: Count) -> list[Sample]:
    return [words.make(task, length, seed) for seed in seeds]


SUITES = {
    "ruler": Suite(ruler.TASKS, real_model, _ruler),
    "words": Suite(
        words.TASKS, lambda: TRAINED, _words,
        dict(
            tasks=words.TASKS, policies=("streaming-llm", "snapkv", "ada-snapkv"),
            budgets=("10%", "20%", "40%", "60%", "80%"), samples=200, length=900,
            concurrency=16, like_for_like=True, dtype="float32", check=3,
            presses=("snapkv", "ada-snapkv", "streaming-llm"),
        ),
    ),
}  # fmt: skip

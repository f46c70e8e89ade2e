"""Default values of options, in the documentation that ships with transformers.

Nothing is made up: context, question and answer are those of docstrings, in which many options of
the same form stand next to one another.
"""

import ast
import random
import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from benchmarks.quality.ruler.sample import RulerSample

CONTEXT = "Read the following documentation. I will ask you about it afterwards.\n{text}"
QUESTION = "What is the default value of `{name}` in the documentation?"
PREFIX = "The default value of `{name}` is"

FILES = "models/*/configuration_*.py"
OPTION = re.compile(r"^(\w+) \(.*[Dd]efaults to `?\"?'?([\w.+-]{2,24}?)[`\"']*\)\s*:")
GUESSED = ("None", "True", "False")
"""Defaults that a model may guess."""


@lru_cache(maxsize=1)
def paragraphs() -> tuple[str, ...]:
    """Paragraphs of the docstrings of transformers' configurations, one line each, in the order of
    the files, which are read and not imported. An option is a paragraph."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    found: dict[str, None] = {}
    for path in sorted(Path(spec.origin).parent.glob(FILES)):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                lines = re.split(r"\n\s*\n|\n(?=\s*\w+ \()", ast.get_docstring(node) or "")
                found.update(dict.fromkeys(" ".join(line.split()) for line in lines))
    return tuple(line for line in found if 30 <= len(line) <= 600 and ">>>" not in line)


def default_value(rng: random.Random, task: str, characters: int) -> RulerSample:
    """The default value of one option among the documentation of others.

    Args:
        rng: Draws the place in the documentation and the option.
        task: Name of the task.
        characters: Of the documentation.

    """
    pool = paragraphs()
    while True:
        place, text, length = rng.randrange(len(pool)), list[str](), 0
        while length < characters:
            text.append(pool[place % len(pool)])
            length += len(text[-1]) + 1
            place += 1
        joined = "\n".join(text)
        options = [match.groups() for match in map(OPTION.match, text) if match]
        # The name must say which option is meant.
        alone = [
            (name, value)
            for name, value in options
            if len(re.findall(rf"\b{name}\b", joined)) == 1 and value not in GUESSED
        ]
        if alone:
            name, value = rng.choice(alone)
            return RulerSample(
                task,
                CONTEXT.format(text=joined),
                QUESTION.format(name=name),
                PREFIX.format(name=name),
                (value,),
                max_tokens=16,
            )

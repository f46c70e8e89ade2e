"""RULER's variable tracking (section 3): a chain of copies in prose, after one worked example."""

import random
import string
from itertools import pairwise

from benchmarks.quality.ruler.prose import hide
from benchmarks.quality.ruler.sample import RulerSample

HOPS = 4
CONTEXT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{text}"
)
QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assigned the value {value}, they are:"
)
EXAMPLE_CHARACTERS = 500


def _chain(rng: random.Random, characters: int) -> tuple[str, str, list[str]]:
    """The text, the value and the variables that hold it."""
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    value, chain = str(rng.randrange(10_000, 100_000)), list(names)
    facts = [f"VAR {chain[0]} = {value}."]
    facts += [f"VAR {new} = VAR {old}." for old, new in pairwise(chain)]
    return hide(rng, facts, characters), value, chain


def tracking(rng: random.Random, task: str, characters: int) -> RulerSample:
    """One chain of five variables; the example before it is solved, as RULER's is."""
    example, example_value, example_chain = _chain(rng, EXAMPLE_CHARACTERS)
    text, value, chain = _chain(rng, characters - EXAMPLE_CHARACTERS)
    shown = "\n".join(
        [
            CONTEXT.format(text=example),
            QUESTION.format(value=example_value),
            f"{PREFIX.format(count=HOPS + 1, value=example_value)} {' '.join(example_chain)}",
        ]
    )
    return RulerSample(
        task,
        f"{shown}\n\n{CONTEXT.format(text=text)}",
        QUESTION.format(value=value),
        PREFIX.format(count=HOPS + 1, value=value),
        tuple(chain),
        max_tokens=40,
    )

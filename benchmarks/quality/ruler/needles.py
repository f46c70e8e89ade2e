"""RULER's needle tasks (section 3): special magic numbers in prose."""

import random

from benchmarks.quality.ruler.prose import hide
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.words import ADJECTIVES, NOUNS

CONTEXT = (
    "{some} special magic {numbers} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {noun} afterwards.\n{text}"
)
QUESTION = "What {are} special magic {noun} for {keys} mentioned in the provided text?"
PREFIX = "The special magic {noun} for {keys} mentioned in the provided text {verb}"


def needles(
    rng: random.Random, task: str, characters: int, keys: int, values: int, asked: int
) -> RulerSample:
    """``keys`` keys of ``values`` numbers each, of which ``asked`` keys are asked for at once."""
    names: dict[str, None] = {}
    while len(names) < keys:
        names[f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"] = None
    numbers = iter(rng.sample(range(1_000_000, 10_000_000), keys * values))
    facts = [(key, str(next(numbers))) for key in names for _ in range(values)]
    wanted = rng.sample(list(names), asked)
    answers = tuple(value for key in wanted for name, value in facts if name == key)
    rng.shuffle(facts)
    noun = "number" if len(answers) == 1 else "numbers"
    listed = ", ".join(wanted[:-1]) + ", and " + wanted[-1] if asked > 1 else wanted[0]
    one = len(answers) == 1
    lines = [f"One of the special magic numbers for {key} is: {value}." for key, value in facts]
    return RulerSample(
        task,
        CONTEXT.format(
            some="A" if one else "Some", numbers="number is" if one else "numbers are", noun=noun,
            text=hide(rng, lines, characters),
        ),
        QUESTION.format(are="is the" if one else "are all the", noun=noun, keys=listed),
        PREFIX.format(noun=noun, keys=listed, verb="is" if one else "are"),
        answers,
        max_tokens=8 + 12 * len(answers),
    )  # fmt: skip

"""RULER's multi-key needles with UUIDs as keys, which differ in one group only."""

import random
import uuid

from benchmarks.quality.ruler.needles import CONTEXT, PREFIX, QUESTION
from benchmarks.quality.ruler.prose import hide
from benchmarks.quality.ruler.sample import RulerSample

KEYS = 4
GROUP = 1
"""The group of four hexadecimal digits that tells the keys apart."""


def uuids(rng: random.Random, task: str, characters: int) -> RulerSample:
    """:data:`KEYS` needles in prose, one of which is asked for.

    RULER's ``niah_multikey_3`` has UUIDs as values, too, and needles instead of prose.

    Args:
        rng: Draws keys, values and places.
        task: Name of the task.
        characters: Of the context.

    """
    groups = str(uuid.UUID(int=rng.getrandbits(128), version=4)).split("-")
    keys = []
    for different in rng.sample(range(16**4), KEYS):
        groups[GROUP] = f"{different:04x}"
        keys.append("-".join(groups))
    values = [str(value) for value in rng.sample(range(1_000_000, 10_000_000), KEYS)]
    lines = [
        f"One of the special magic numbers for {key} is: {value}."
        for key, value in zip(keys, values, strict=True)
    ]
    key, value = rng.choice(list(zip(keys, values, strict=True)))
    words = {"noun": "number", "keys": key}
    context = CONTEXT.format(
        some="A", numbers="number is", noun="number", text=hide(rng, lines, characters)
    )
    return RulerSample(
        task,
        context,
        QUESTION.format(are="is the", **words),
        PREFIX.format(verb="is", **words),
        (value,),
        max_tokens=20,
    )

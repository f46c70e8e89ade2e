"""Several facts in one long text, each asked for on its own."""

import random
from collections.abc import Callable, Sequence

from benchmarks.quality.ruler.facts import CONTEXT, FIRST, LAST, Kind, sentences
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.unseen import KINDS, PACKAGE

TASK = "scattered"


def scattered(
    rng: random.Random,
    tokens: int,
    facts: int,
    encode: Callable[[str], Sequence[int]],
    task: str = TASK,
    kinds: Sequence[Kind] = KINDS,
    package: str = PACKAGE,
) -> list[RulerSample]:
    """Samples of one context with a fact of another kind in each of its parts of like length.

    Args:
        rng: Draws kinds, names, answers, and the places of the facts and of the prose.
        tokens: Of the text, facts included, to within a sentence.
        facts: How many, at most as many as there are kinds.
        encode: Token ids of a text.
        task: Name of the task.
        kinds: Of facts; without them, and without ``package``, those of the task ``unseen``.
        package: The docstrings of this package are the prose.

    Returns:
        One sample a fact, in the order of the text; all have the same context.

    """
    chosen = rng.sample(kinds, facts)
    people = zip(rng.sample(FIRST, facts), rng.sample(LAST, facts), strict=True)
    names = [" ".join(person) for person in people]
    answers = [value(rng) for *_, value in chosen]
    stated = [
        kind[0].format(n=name, x=answer)
        for kind, name, answer in zip(chosen, names, answers, strict=True)
    ]
    pool, text = sentences(package), list[str]()
    place, length = rng.randrange(len(pool)), sum(len(encode(f" {one}")) for one in stated)
    while length < tokens:
        text.append(pool[place % len(pool)])
        length += len(encode(f" {text[-1]}"))
        place += 1
    for part in reversed(range(facts)):
        first, end = len(text) * part // facts, len(text) * (part + 1) // facts
        text.insert(rng.randrange(first, end), stated[part])
    context = CONTEXT.format(text=" ".join(text))
    return [
        RulerSample(
            task, context, question.format(n=name), prefix.format(n=name), (answer,), max_tokens=16
        )
        for (_, question, prefix, _), name, answer in zip(chosen, names, answers, strict=True)
    ]

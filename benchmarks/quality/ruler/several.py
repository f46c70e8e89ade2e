"""Several facts of the task ``later`` in one text: no value stands anywhere else in it."""

import random
import re
from collections.abc import Callable, Iterable, Sequence

from benchmarks.quality.ruler import later
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.scattered import scattered

TOKENS_PER_FACT = 80
"""Minimum number of tokens of a fact together with the prose around it."""
LIST_NUMBER = re.compile(r"^\s*\d+[.)]", re.MULTILINE)
"""The number of a list's item at the beginning of a line."""


def count(value: str, text: str) -> int:
    """How often ``value`` occurs in ``text`` as whole words; upper and lower case are the same."""
    return len(re.findall(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE))


def share_said(values: Iterable[str], text: str) -> float:
    """Share of ``values`` that occur in ``text`` as whole words, in [0, 1].

    The numbers of a list's items are left out: a long list would contain every small number.
    """
    without = LIST_NUMBER.sub("", text)
    found = [count(value, without) > 0 for value in values]
    return sum(found) / len(found)


def several(
    rng: random.Random, task: str, tokens: int, facts: int, encode: Callable[[str], Sequence[int]]
) -> list[RulerSample]:
    """Samples of one context, one for each fact, each of another kind of the task ``later``.

    Facts, names and prose are drawn anew until each value occurs once in the context, so that an
    answer which contains a value was taken from its fact.

    Args:
        rng: Draws kinds, names, values, and the places of the facts and of the prose.
        task: Name of the task.
        tokens: Of the text, facts included, to within a sentence.
        facts: How many, from 1 to the number of kinds.
        encode: Token ids of a text.

    Returns:
        One sample a fact, in the order of the text; all have the same context.

    Raises:
        ValueError: There are not so many kinds, or the text is too short for so many facts.

    """
    if not 1 <= facts <= len(later.KINDS):
        raise ValueError(f"{facts} facts; from 1 to {len(later.KINDS)} are possible")
    least = TOKENS_PER_FACT * facts
    if tokens < least:
        raise ValueError(
            f"--length leaves {tokens} tokens for the text, and {facts} facts need {least}"
        )
    while True:
        samples = scattered(rng, tokens, facts, encode, task, later.KINDS, later.PACKAGE)
        if all(count(sample.answers[0], sample.context) == 1 for sample in samples):
            return samples

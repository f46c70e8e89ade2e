"""RULER's tasks by name, and some of our own; samples of a length in tokens."""

import random
from collections.abc import Callable

from benchmarks.quality.ruler.counting import common_words, frequent_words
from benchmarks.quality.ruler.facts import fact
from benchmarks.quality.ruler.later import later
from benchmarks.quality.ruler.needles import needles
from benchmarks.quality.ruler.options import default_value
from benchmarks.quality.ruler.questions import question
from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.tracking import tracking
from benchmarks.quality.ruler.unseen import unseen
from benchmarks.quality.ruler.uuids import uuids

Make = Callable[[random.Random, str, int], RulerSample]


def _needles(keys: int, values: int, asked: int) -> Make:
    return lambda rng, task, characters: needles(rng, task, characters, keys, values, asked)


MAKE: dict[str, Make] = {
    "s-niah": _needles(1, 1, 1),
    "mk-niah": _needles(4, 1, 1),
    "mv-niah": _needles(1, 4, 1),
    "mq-niah": _needles(4, 1, 4),
    "vt": tracking,
    "cwe": common_words,
    "fwe": frequent_words,
    "qa": question,
    "facts": fact,
    "unseen": unseen,
    "later": later,
    "uuids": uuids,
    "defaults": default_value,
}
TASKS = tuple(MAKE)


def make(task: str, characters: int, seed: int) -> RulerSample:
    """A sample whose context holds about ``characters`` characters; a seed gives always the same.

    Raises:
        KeyError: The task does not exist.

    """
    return MAKE[task](random.Random(f"ruler/{task}/{seed}"), task, characters)


def characters_for(task: str, tokens: int, count: Callable[[RulerSample], int]) -> int:
    """Characters of context that make prompts of about ``tokens`` tokens.

    Args:
        task: One of :data:`TASKS`.
        tokens: Wanted length of the whole prompt.
        count: Tokens of a sample's prompt.

    """
    # Two lengths give what a character costs and what template and question cost beside it.
    short, long = (4 * tokens * share // 4 for share in (2, 4))
    low, high = (count(make(task, characters, 0)) for characters in (short, long))
    return max(200, round(short + (tokens - low) * (long - short) / max(1, high - low)))

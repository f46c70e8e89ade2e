"""English prose that every Python has: the paragraphs of its documentation's topics."""

import random
import re
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pydoc_data.topics import topics

NO_PROSE = re.compile(r"::=|>>>|[{}=<>|\\]|\*\*|__|Changed in|New in|Deprecated")
SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z])")


def is_prose(text: str) -> bool:
    """Whether a paragraph is sentences rather than code, grammar, a list or a heading."""
    if len(text.split()) < 15 or not text[0].isupper() or text[-1] != "." or NO_PROSE.search(text):
        return False
    return sum(c.isalpha() or c in " ,." for c in text) >= 0.92 * len(text)


@lru_cache(maxsize=1)
def paragraphs() -> tuple[str, ...]:
    """Distinct paragraphs in the order of the topics: about 110,000 characters."""
    found: dict[str, None] = {}
    for _, topic in sorted(topics.items()):
        for block in topic.split("\n\n"):
            text = " ".join(block.split()).lstrip("* ")
            if is_prose(text):
                found[text] = None
    return tuple(found)


@lru_cache(maxsize=1)
def sentences() -> tuple[str, ...]:
    return tuple(s for paragraph in paragraphs() for s in SENTENCE_END.split(paragraph))


def spread(part: int, parts: int) -> int:
    """The sentence at which the ``part``-th of ``parts`` stretches of like length begins."""
    ends = list(accumulate(len(s) + 1 for s in sentences()))
    return bisect_right(ends, ends[-1] * part // parts)


def passage(rng: random.Random, characters: int, place: int | None = None) -> list[str]:
    """Neighbouring sentences, at least ``characters`` long together.

    The text begins again where it ends.

    Args:
        rng: Draws the place where None is given.
        characters: Length at least.
        place: Number of the first sentence.

    """
    pool = sentences()
    place, found, length = rng.randrange(len(pool)) if place is None else place, [], 0
    while length < characters:
        found.append(pool[place % len(pool)])
        length += len(found[-1]) + 1
        place += 1
    return found


def hide(rng: random.Random, facts: list[str], characters: int) -> str:
    """Facts in their order at random places between the sentences of a passage."""
    text = passage(rng, max(0, characters - sum(len(fact) + 1 for fact in facts)))
    places = set(rng.sample(range(len(text) + len(facts)), len(facts)))
    fact, rest = iter(facts), iter(text)
    return " ".join(
        next(fact) if i in places else next(rest) for i in range(len(text) + len(facts))
    )

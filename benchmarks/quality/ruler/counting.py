"""RULER's counting tasks (section 3): common words of a list, frequent words of a coded text."""

import random
import string

from benchmarks.quality.ruler.sample import RulerSample
from benchmarks.quality.ruler.words import ADJECTIVES, NOUNS, VERBS

COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{words}"
)
COMMON_QUESTION = "Question: What are the 10 most common words in the above list?"
COMMON_PREFIX = "Answer: The top 10 words that appear most often in the list are:"
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {words}"
)
FREQUENT_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
FREQUENT_PREFIX = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
CHARACTERS_PER_WORD = 11


def _list(rng: random.Random, characters: int, often: int, others: int) -> tuple[str, list[str]]:
    """Ten words ``often`` times, further ones ``others`` times, shuffled and numbered."""
    vocabulary = rng.sample(NOUNS + ADJECTIVES + VERBS, len(NOUNS + ADJECTIVES + VERBS))
    common, rare = vocabulary[:10], vocabulary[10:]
    count = max(0, characters // CHARACTERS_PER_WORD - 10 * often) // others
    words = common * often + rare[:count] * others
    rng.shuffle(words)
    return " ".join(f"{index}. {word}" for index, word in enumerate(words, 1)), common


def common_words(rng: random.Random, task: str, characters: int) -> RulerSample:
    """Ten words make half of the list, each other word stands there once; one solved example."""
    example, answers = _list(rng, 500, often=3, others=1)
    text, common = _list(rng, characters - 500, max(2, characters // CHARACTERS_PER_WORD // 20), 1)
    solved = " ".join(f"{index}. {word}" for index, word in enumerate(answers, 1))
    shown = f"{COMMON.format(words=example)}\n{COMMON_QUESTION} {COMMON_PREFIX} {solved}"
    return RulerSample(
        task, f"{shown}\n{COMMON.format(words=text)}", COMMON_QUESTION, COMMON_PREFIX,
        tuple(common), max_tokens=120,
    )  # fmt: skip


def frequent_words(rng: random.Random, task: str, characters: int) -> RulerSample:
    """Coded words whose frequencies fall as rank ** -2; the first rank are dots, to be ignored."""
    words, total = ["...."], max(40, characters // 8)
    while len(words) < 50:
        words.append("".join(rng.choices(string.ascii_lowercase, k=6)))
    shares = [rank**-2.0 for rank in range(1, len(words) + 1)]
    text = [
        word
        for word, share in zip(words, shares, strict=True)
        for _ in range(round(total * share / sum(shares)))
    ]
    rng.shuffle(text)
    return RulerSample(
        task, FREQUENT.format(words=" ".join(text)), FREQUENT_QUESTION, FREQUENT_PREFIX,
        tuple(words[1:4]), max_tokens=50,
    )  # fmt: skip

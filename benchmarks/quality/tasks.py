"""Retrieval, tracking and counting tasks after RULER (Ada-KV appendix A.4), as seeded text.

Names, values, filler sentences and positions are split in two by a hash: training never sees
what evaluation asks for.
"""

import itertools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.quality.words import ADJECTIVES, NOUNS, NUMBERS, PLACES, VARIABLES, VERBS

Turn = tuple[str, tuple[str, ...]]
"""A question and the answers it expects, in order."""

HELD_OUT = 8
"""One in so many names, values, sentences and positions is kept for evaluation."""


@dataclass(frozen=True)
class Sample:
    """One evaluation sample: the prompt is ``context``, a line break, ``question``."""

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    separator: str = ", "
    prefix: str = ""
    max_tokens: int = 48

    def score(self, text: str) -> float:
        """Share of the expected answers found in ``text``, in [0, 1], as RULER counts it."""
        words = f" {' '.join(text.lower().replace(',', ' ').replace('.', ' ').split())} "
        return sum(f" {answer} " in words for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Dialogue:
    """A context with several questions about it; training uses all, evaluation the first."""

    context: str
    turns: list[Turn]
    separator: str = ", "
    """What stands between the answers to one question."""


def held_out(*parts: str | int) -> bool:
    """Whether a combination is kept for evaluation; the same in every process."""
    return zlib.crc32(" ".join(map(str, parts)).encode()) % HELD_OUT == 0


class Writer:
    """Draws names, values and sentences from one of the two halves.

    Args:
        rng: Source of all randomness.
        evaluation: True draws what is held out, False everything else.

    """

    def __init__(self, rng: random.Random, evaluation: bool) -> None:
        self.rng = rng
        self.evaluation = evaluation

    def _draw(self, make: Callable[[], tuple[str, ...]], kind: str) -> tuple[str, ...]:
        while held_out(kind, *(drawn := make())) != self.evaluation:
            pass
        return drawn

    def _unique(self, make: Callable[[], str], count: int) -> list[str]:
        seen: dict[str, None] = {}
        while len(seen) < count:
            seen[make()] = None
        return list(seen)

    def names(self, count: int) -> list[str]:
        """Distinct names such as ``silent harbor``; no noun twice before each was used.

        LongEval draws from so many nouns that two lines of a text hardly ever share one.
        """
        pick, nouns = self.rng.choice, itertools.cycle(self.rng.sample(NOUNS, len(NOUNS)))

        def name() -> str:
            noun = next(nouns)
            return " ".join(self._draw(lambda: (pick(ADJECTIVES), noun), "name"))

        return self._unique(name, count)

    def values(self, count: int) -> list[str]:
        """Distinct values such as ``482 913``.

        In evaluation no number is used twice before nearly all were: a value of LongEval is one
        number of five digits, and they collide as rarely. Training is harder.
        """
        pick = self.rng.choice
        if not self.evaluation:
            return self._unique(
                lambda: " ".join(self._draw(lambda: (pick(NUMBERS), pick(NUMBERS)), "value")), count
            )
        free: list[str] = []

        def value() -> str:
            nonlocal free
            while True:
                if len(free) < 2 * HELD_OUT:
                    free = self.rng.sample(NUMBERS, len(NUMBERS))
                first = free.pop()
                for second in free:
                    if held_out("value", first, second):
                        free.remove(second)
                        return f"{first} {second}"

        return self._unique(value, count)

    def sentence(self) -> str:
        pick = self.rng.choice
        a, b, c, d, verb, place = self._draw(
            lambda: (
                pick(ADJECTIVES), pick(NOUNS), pick(ADJECTIVES), pick(NOUNS), pick(VERBS),
                pick(PLACES),
            ),
            "sentence",
        )  # fmt: skip
        form = self.rng.randrange(4)
        if form == 0:
            return f"the {a} {b} {verb} the {c} {d}."
        if form == 1:
            return f"{place} the {b}, a {c} {d} {verb} the {a} one."
        if form == 2:
            return f"every {b} {verb} a {d} {place} the {c} hill."
        return f"the {b} is {a} and the {d} is {c}."

    def slots(self, total: int, count: int) -> list[int]:
        """Distinct sentence positions in [0, total), sorted; one held-out position in eight."""
        free = [i for i in range(total) if (i % HELD_OUT == 5) == self.evaluation]
        if len(free) < count:
            free = list(range(total))
        return sorted(self.rng.sample(free, count))

    def mix(self, facts: list[str], words: int) -> str:
        """Facts in their order, spread over filler up to ``words`` words and stops."""
        filler, room = [], words - sum(map(length, facts))
        while room > 0:
            filler.append(self.sentence())
            room -= length(filler[-1])
        total = len(facts) + len(filler)
        places = set(self.slots(total, len(facts)))
        fact, rest = iter(facts), iter(filler)
        return " ".join(next(fact) if i in places else next(rest) for i in range(total))


def length(text: str) -> int:
    """Words and stops."""
    return len(text.split()) + sum(map(text.count, ".,"))


def needles(write: Writer, words: int, names: int, values: int, asked: int, turns: int) -> Dialogue:
    """Needles in filler: ``names`` names with ``values`` values each, asked for in groups."""
    keys, drawn = write.names(names), write.values(names * values)
    of = {key: drawn[i * values : (i + 1) * values] for i, key in enumerate(keys)}
    facts = [(key, value) for key, found in of.items() for value in found]
    write.rng.shuffle(facts)
    context = write.mix([f"the magic number for {k}: {v}." for k, v in facts], words)
    for key in keys:
        of[key] = [v for k, v in facts if k == key]
    questions: list[Turn] = []
    for _ in range(turns):
        group = write.rng.sample(keys, asked)
        plural = "what is the magic number" if asked * values == 1 else "what are the magic numbers"
        names_text = ", ".join(group[:-1]) + (" and " if asked > 1 else "") + group[-1]
        # Which value belongs to which name is part of the answer.
        pairs = [(key, value) for key in group for value in of[key]]
        answers = tuple(f"{key} {value}" if asked > 1 else value for key, value in pairs)
        questions.append((f"{plural} for {names_text}?", answers))
    return Dialogue(context, questions)


def lines(write: Writer, words: int, turns: int) -> Dialogue:
    """LongEval's line retrieval (SubGen section 3): nothing but lines."""
    count = max(2, words // 9)
    facts = list(zip(write.names(count), write.values(count), strict=True))
    keys, values = zip(*facts, strict=True)
    context = "\n".join(f"line {key}: {value} is the content." for key, value in facts)
    asked = write.slots(count, min(turns, max(1, count * 3 // 4)))
    write.rng.shuffle(asked)
    return Dialogue(
        context, [(f"what is the content of line {keys[i]}?", (values[i],)) for i in asked]
    )


def tracking(write: Writer, words: int, turns: int, hops: int) -> Dialogue:
    """Variable tracking: chains of copies; which variables hold a value?"""
    chains = min(turns, max(1, words // (10 * hops)), 6)
    names = write.rng.sample(VARIABLES, chains * hops)
    values = write.values(chains)
    pending, questions = [], []
    for c, value in enumerate(values):
        chain = names[c * hops : (c + 1) * hops]
        first = f"store {value} -> {chain[0]}."
        rest = [f"copy {a} -> {b}." for a, b in pairwise(chain)]
        pending.append([first, *rest])
        questions.append((f"which variables hold {value}?", tuple(chain)))
    facts = []
    while any(pending):
        facts.append(write.rng.choice([chain for chain in pending if chain]).pop(0))
    write.rng.shuffle(questions)
    return Dialogue(write.mix(facts, words), questions, separator=" ")


def common_words(write: Writer, words: int) -> Dialogue:
    """CWE: five words occur often, the others at most a third as often."""
    vocabulary = write.rng.sample(NOUNS + ADJECTIVES, len(NOUNS + ADJECTIVES))
    often = max(4, words // 25)
    common, others = vocabulary[:5], vocabulary[5:]
    text = [word for word in common for _ in range(often)]
    for i in range(max(0, words - len(text))):
        text.append(others[i % max(len(others) // 2, 1)])
    write.rng.shuffle(text)
    return Dialogue(" ".join(text), [("what are the five most common words?", tuple(common))])


def frequent_words(write: Writer, words: int) -> Dialogue:
    """FWE: frequencies fall as a zeta law; which three words lead?"""
    vocabulary = write.rng.sample(NOUNS, 40)
    weights = [1 / (rank + 1) ** 1.6 for rank in range(len(vocabulary))]
    counts = [max(1, round(words * weight / sum(weights))) for weight in weights]
    text = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    write.rng.shuffle(text)
    question = "what are the three most frequent words?"
    return Dialogue(" ".join(text), [(question, tuple(vocabulary[:3]))])


EVALUATION: dict[str, Callable[[Writer, int], Dialogue]] = {
    "s-niah": lambda write, words: needles(write, words, 1, 1, 1, 1),
    "mk-niah": lambda write, words: needles(write, words, max(4, words // 60), 1, 1, 1),
    "mv-niah": lambda write, words: needles(write, words, 4, 4, 1, 1),
    "mq-niah": lambda write, words: needles(write, words, max(4, words // 120), 1, 4, 1),
    "vt": lambda write, words: tracking(write, words, 3, 4),
    "cwe": common_words,
    "fwe": frequent_words,
    "lines": lambda write, words: lines(write, words, 1),
}
TASKS = tuple(EVALUATION)


def make(task: str, words: int, seed: int) -> Sample:
    """An evaluation sample from held-out material.

    Args:
        task: One of :data:`TASKS`.
        words: Length of the context in words and stops, about.
        seed: The same seed gives the same sample.

    Raises:
        KeyError: The task does not exist.

    """
    write = Writer(random.Random(f"{task}/{words}/{seed}"), evaluation=True)
    dialogue = EVALUATION[task](write, words)
    question, answers = dialogue.turns[0]
    return Sample(task, dialogue.context, question, answers, dialogue.separator)

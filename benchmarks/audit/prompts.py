"""The mixture: documents, what is asked about them, and where each prompt is evicted."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.quality.local_chat import LocalChat
from benchmarks.quality.prompt import make_prompt, message
from benchmarks.quality.ruler import tasks
from benchmarks.quality.ruler.facts import sentences

NEEDLE_KNOWN = "needle, question known"
NEEDLE = "needle, question not known"
FACTS = "other facts, not known"
PROSE = "prose, continued"
FOUR_KNOWN = "four values, question known"
FOUR = "four values, question not known"
KINDS = (NEEDLE_KNOWN, NEEDLE, FOUR_KNOWN, FOUR, FACTS, PROSE)

NEEDLE_TASK, FACTS_TASK, FOUR_TASK = "s-niah", "unseen", "mv-niah"
PROSE_PACKAGE = "vllm"
"""Whose docstrings are the prose: the shipped profile learned of other ones."""

SPARE = 8
"""Characters of prose per wanted token; what is too much is cut off."""


@dataclass(frozen=True)
class Document:
    """A prompt, and the points at which it is evicted.

    Args:
        ids: Token ids of the whole prompt. It may hold the beginning of the answer.
        points: Tokens before the eviction, by kind of the mixture.

    """

    ids: tuple[int, ...]
    points: dict[str, int]


class Mixture:
    """Draws documents of about the same length.

    Args:
        chat: Template and tokenizer of the model.
        tokens: Of a prompt, about.
        kinds: Of :data:`KINDS`.

    """

    def __init__(self, chat: LocalChat, tokens: int, kinds: Sequence[str] = KINDS) -> None:
        self._chat = chat
        self._tokens = tokens
        self._kinds = kinds
        wanted = [FACTS_TASK] if FACTS in kinds else []
        if NEEDLE in kinds or NEEDLE_KNOWN in kinds:
            wanted.append(NEEDLE_TASK)
        if FOUR in kinds or FOUR_KNOWN in kinds:
            wanted.append(FOUR_TASK)
        self._characters = {
            task: tasks.characters_for(task, tokens, self._count) for task in wanted
        }

    def _count(self, sample: tasks.RulerSample) -> int:
        return len(self._chat.tokenize(message(sample)))

    def documents(self, seed: int) -> list[Document]:
        """The documents of a seed: each kind has a prompt in one of them.

        The needle's is one document, evicted behind its question and in front of it.
        """
        found = []
        if NEEDLE_TASK in self._characters:
            found.append(self._asked(NEEDLE_TASK, seed, {NEEDLE_KNOWN: True, NEEDLE: False}))
        if FACTS_TASK in self._characters:
            found.append(self._asked(FACTS_TASK, seed, {FACTS: False}))
        if PROSE in self._kinds:
            ids = tuple(self._prose(seed))
            found.append(Document(ids, {PROSE: len(ids)}))
        if FOUR_TASK in self._characters:
            found.append(self._asked(FOUR_TASK, seed, {FOUR_KNOWN: True, FOUR: False}))
        return found

    def _asked(self, task: str, seed: int, kinds: dict[str, bool]) -> Document:
        sample = tasks.make(task, self._characters[task], seed)
        prompt = make_prompt(sample, self._chat.tokenize, self._chat.encode)
        points = {
            kind: len(prompt.ids) if known else prompt.context
            for kind, known in kinds.items()
            if kind in self._kinds
        }
        return Document(prompt.ids, points)

    def _prose(self, seed: int) -> list[int]:
        rng, pool = random.Random(f"audit/{seed}"), sentences(PROSE_PACKAGE)
        place, text, length = rng.randrange(len(pool)), [], 0
        while length < SPARE * self._tokens:
            text.append(pool[place % len(pool)])
            length += len(text[-1]) + 1
            place += 1
        return self._chat.encode(" ".join(text))[: self._tokens]

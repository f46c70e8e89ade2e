"""Dialogues about documents: what each turn asks, and which number answers it."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.quality.ruler.needles import CONTEXT, PREFIX, QUESTION
from benchmarks.quality.ruler.prose import hide
from benchmarks.quality.ruler.words import ADJECTIVES, NOUNS

Messages = list[dict[str, str]]

NEEDLE = "One of the special magic numbers for {key} is: {value}."
HIDDEN = re.compile(NEEDLE.format(key=r"\S+", value=r"(\d+)").replace(".", r"\."))
NEEDLE_TOKENS = 32
"""Most tokens of an answer that is a number in a sentence."""

PASSAGE = (
    "Here is more of the text. One more special magic number is hidden within it.\n{text}\n\n"
    "{question}"
)
"""User message of a later turn, in chats that grow."""

SUMMARIES = (
    "Summarize the text in a few sentences.",
    "What is this text about? Answer in a few sentences.",
    "Explain the most important points of the text to a beginner.",
    "Write a short abstract of the text.",
)
"""First questions; sessions about one document begin with different ones, as far as there are."""


@dataclass(frozen=True)
class Question:
    """A turn's question.

    Args:
        text: What the user says.
        max_tokens: Most tokens of the answer.
        number: What a right answer holds; None where no answer is right or wrong.
        prefix: How the answer begins; only base models are given it.

    """

    text: str
    max_tokens: int
    number: str | None = None
    prefix: str = ""

    def right(self, answer: str) -> bool:
        """Return True if ``answer`` contains the number."""
        assert self.number is not None
        return _names(answer, self.number)


@dataclass(frozen=True)
class Dialogue:
    """A document and the questions of one chat about it, a question a turn."""

    document: str
    questions: tuple[Question, ...]

    @property
    def numbers(self) -> list[str]:
        """All numbers that its texts hide."""
        texts = (self.document, *(question.text for question in self.questions))
        return HIDDEN.findall("\n".join(texts))

    def is_mistaken(self, turn: int, answer: str) -> bool:
        """Return True if a turn's answer is wrong and contains another hidden number."""
        question = self.questions[turn]
        if question.number is None or question.right(answer):
            return False
        return any(_names(answer, number) for number in self.numbers)

    def messages(self, answers: Sequence[str]) -> Messages:
        """The messages of the turn after so many answers; the document is the first of them."""
        texts = [question.text for question in self.questions[: len(answers) + 1]]
        found = [_said("user", self.document), _said("user", texts[0])]
        for answer, text in zip(answers, texts[1:], strict=True):
            found += [_said("assistant", answer), _said("user", text)]
        return found


def for_base_model(dialogue: Dialogue) -> Dialogue:
    """The dialogue with questions that end with the beginning of their answers.

    A base model continues a text, and would rather continue with another question.
    """
    begun = (
        replace(question, text=f"{question.text}\n{question.prefix}")
        if question.prefix
        else question
        for question in dialogue.questions
    )
    return Dialogue(dialogue.document, tuple(begun))


def _asked(key: str) -> dict[str, str]:
    """Text and prefix of the question for the number of a key."""
    words = dict(noun="number", keys=key)
    return dict(
        text=QUESTION.format(are="is the", **words), prefix=PREFIX.format(verb="is", **words)
    )


def _names(answer: str, number: str) -> bool:
    """Return True if the answer contains the number, and not only inside a longer number."""
    return re.search(rf"(?<!\d){number}(?!\d)", answer) is not None


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def make(
    count: int, turns: int, sessions: int, characters: int, summary_tokens: int, seed: int = 0
) -> list[Dialogue]:
    """Dialogues whose first turn asks for a summary and every other one for a needle of its own.

    Sessions about one document are as far apart in the list as they can be.

    Args:
        count: Dialogues.
        turns: Of each dialogue, 2 or more.
        sessions: Dialogues about each document.
        characters: Of a document, about.
        summary_tokens: Most tokens of a summary.
        seed: The same arguments give the same dialogues.

    Raises:
        ValueError: A number is too small.

    """
    if count < 1 or turns < 2 or sessions < 1:
        raise ValueError("chats: 1 or more, of 2 turns or more, in 1 session or more")
    documents = -(-count // sessions)
    made = [
        _sessions(
            random.Random(f"chat/{seed}/{number}"), number, turns, sessions, characters,
            summary_tokens,
        )
        for number in range(documents)
    ]  # fmt: skip
    return [made[index % documents][index // documents] for index in range(count)]


def make_growing(
    count: int, turns: int, characters: int, passage: int, summary_tokens: int, seed: int = 0
) -> list[Dialogue]:
    """Dialogues in which every turn brings new text, as agents' do, and asks about older text.

    The document and each later passage hide a number. Every turn but the first asks for the number
    of an earlier turn, drawn at random.

    Args:
        count: Dialogues.
        turns: Of each dialogue, 2 or more.
        characters: Of a document, about.
        passage: Characters of the text of each later turn, about.
        summary_tokens: Most tokens of a summary.
        seed: The same arguments give the same dialogues.

    Raises:
        ValueError: A number is too small.

    """
    if count < 1 or turns < 2 or passage < 1:
        raise ValueError(
            "chats: 1 or more, of 2 turns or more, with passages of 1 character or more"
        )
    return [
        _growing(random.Random(f"growing/{seed}/{number}"), number, turns, characters, passage,
                 summary_tokens)
        for number in range(count)
    ]  # fmt: skip


def _growing(
    rng: random.Random, number: int, turns: int, characters: int, passage: int, tokens: int
) -> Dialogue:
    needles = list(_needles(rng, turns).items())
    parts = [
        hide(rng, [NEEDLE.format(key=key, value=value)], passage if part else characters)
        for part, (key, value) in enumerate(needles)
    ]
    context = CONTEXT.format(some="A", numbers="number is", noun="number", text=parts[0])
    questions = [Question(SUMMARIES[number % len(SUMMARIES)], tokens)]
    for turn in range(1, turns):
        key, value = needles[rng.randrange(turn)]
        asked = _asked(key)
        said = PASSAGE.format(text=parts[turn], question=asked["text"])
        questions.append(Question(said, NEEDLE_TOKENS, value, asked["prefix"]))
    return Dialogue(f"Document {number + 1}. {context}", tuple(questions))


def _needles(rng: random.Random, count: int) -> dict[str, str]:
    """So many distinct keys with distinct numbers."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"] = None
    values = map(str, rng.sample(range(1_000_000, 10_000_000), len(keys)))
    return dict(zip(keys, values, strict=True))


def _sessions(
    rng: random.Random, number: int, turns: int, sessions: int, characters: int, tokens: int
) -> list[Dialogue]:
    """All sessions about one document, which holds a needle for each question about numbers."""
    asked = turns - 1
    needles = _needles(rng, sessions * asked)
    lines = [NEEDLE.format(key=key, value=value) for key, value in needles.items()]
    rng.shuffle(lines)
    text, one = hide(rng, lines, characters), len(lines) == 1
    context = CONTEXT.format(
        some="A" if one else "Some", numbers="number is" if one else "numbers are",
        noun="number" if one else "numbers", text=text,
    )  # fmt: skip
    # The number in front: no two documents begin alike, whatever passage they drew.
    document = f"Document {number + 1}. {context}"
    questions = [
        Question(max_tokens=NEEDLE_TOKENS, number=value, **_asked(key))
        for key, value in needles.items()
    ]
    return [
        Dialogue(
            document,
            (
                Question(SUMMARIES[session % len(SUMMARIES)], tokens),
                *questions[session * asked : (session + 1) * asked],
            ),
        )
        for session in range(sessions)
    ]

"""A sample as the server sees it: token ids of its chat, and where the context ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.quality.ruler.facts import CONTEXT
from benchmarks.quality.ruler.sample import RulerSample

AWARE, AGNOSTIC = "question-aware", "question-agnostic"
SCENARIOS = (AWARE, AGNOSTIC)
OTHER_QUESTIONS = ("", "Which of these was it?")
"""Put in the place of a sample's question to see where its prompt begins to depend on it."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of a sample's chat; the first ``context`` of them do not depend on the question."""

    sample: RulerSample
    ids: tuple[int, ...]
    context: int

    def point(self, scenario: str) -> int:
        """The eviction point E of a scenario, in tokens."""
        return len(self.ids) if scenario == AWARE else self.context


def message(
    sample: RulerSample, question: str | None = None, between: str = "\n"
) -> list[dict[str, str]]:
    """The chat of a sample: one user message, the context and below it the question."""
    asked = sample.question if question is None else question
    return [{"role": "user", "content": f"{sample.context}{between}{asked}"}]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two token sequences."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def make_prompt(
    sample: RulerSample,
    tokenize: Callable[[list[dict[str, str]]], list[int]],
    encode: Callable[[str], list[int]],
    between: str = "\n",
) -> Prompt:
    """Render a sample through ``tokenize``, which applies the chat template.

    ``encode`` gives the tokens of a text alone: the beginning of the answer. ``between`` stands
    between context and question.

    The context ends where the prompt first differs from that of another question or of none:
    what is compressed there is the same whatever will be asked.

    Raises:
        ValueError: The context does not survive the chat template as a prefix.

    """
    ids = tokenize(message(sample, None, between))
    others = [tokenize(message(sample, question, between)) for question in OTHER_QUESTIONS]
    context = min(common_prefix(ids, other) for other in others)
    if not 0 < context < len(ids):
        raise ValueError(
            f"{sample.task}: {context} of {len(ids)} prompt tokens come before the question; "
            "question-agnostic compression needs a chat template that puts the context first"
        )
    return Prompt(sample, (*ids, *(encode(sample.prefix) if sample.prefix else ())), context)


def text_tokens(
    length: int, question: str, tokenize: Callable[[list[dict[str, str]]], list[int]]
) -> int:
    """Tokens of text that make a prompt of about ``length`` tokens with a question.

    Args:
        length: Tokens of the whole prompt.
        question: Stands after the text.
        tokenize: Applies the chat template.

    """
    empty = f"{CONTEXT.format(text='')}\n{question}"
    return length - len(tokenize([{"role": "user", "content": empty}]))

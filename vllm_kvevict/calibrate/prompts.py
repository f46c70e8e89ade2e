"""The prompts for which pages are ranked: a built-in set, or an operator's own."""

import json
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvevict.calibrate.read_prompt import read_prompt

TOPICS = (
    "exceptions objects import naming calls execmodel debugger strings typesmapping types "
    "attribute-access numeric-types identifiers customization"
).split()
"""Chapters of Python's own documentation, which every Python carries, in this order."""

PLACES = "harbour museum library airport theatre hospital bakery observatory".split()

ASKS = (
    "Which chapters of the text are about errors, and what do they say? Answer in two sentences.",
    "Summarise the text above in three sentences.",
)


class PromptsError(Exception):
    """The prompts cannot be used. The message is one sentence."""


@dataclass(frozen=True)
class Sample:
    """A text, and the question that follows it."""

    context: str
    question: str


def builtin(count: int, fits: Callable[[str], bool]) -> list[Sample]:
    """Samples of real prose: two of three hide facts and ask for them, others ask for a summary.

    Args:
        count: How many.
        fits: Whether a text is short enough.

    """
    return [_sample(index, fits) for index in range(count)]


def _sample(index: int, fits: Callable[[str], bool]) -> Sample:
    rng = random.Random(index)
    facts = [
        f"The access code of the {place} is {rng.randrange(10**6, 10**7)}."
        for place in rng.sample(PLACES, 4)
    ]
    places = " and of ".join(fact.split(" of the ")[1].split(" is ")[0] for fact in facts[:2])
    lines = _prose(index)
    # The longest text that fits, by halving.
    low, high = 0, len(lines)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits("\n".join(lines[:middle])) else (low, middle - 1)
    lines = lines[: max(low, 1)]
    if index % 3 == 2:
        return Sample("\n".join(lines), ASKS[index // 3 % len(ASKS)])
    for fact in facts:
        lines.insert(rng.randrange(len(lines) + 1), fact)
    return Sample("\n".join(lines), f"What are the access codes of the {places}?")


def _prose(index: int) -> list[str]:
    from pydoc_data.topics import topics

    first = index % len(TOPICS)
    chapters = [topics[name] for name in (*TOPICS[first:], *TOPICS[:first]) if name in topics]
    return textwrap.wrap(" ".join(" ".join(chapters).split()), 100)


def token_ids(tokenizer: Any, sample: Sample) -> tuple[list[int], list[int]]:
    """A sample as a server gets it: with its question, and up to where the question begins."""
    chat = bool(getattr(tokenizer, "chat_template", None))
    prompt = read_prompt(tokenizer, sample.context, sample.question, None, chat)
    return prompt.ids, prompt.ids[: prompt.context]


def from_file(path: Path, tokenizer: Any) -> list[list[int]]:
    """Read prompts: JSON lines, each a text or a list of chat messages.

    Raises:
        PromptsError: The file cannot be read, a line is neither, or there is none.

    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [_ids(tokenizer, json.loads(line)) for line in lines]
    except OSError as error:
        raise PromptsError(f"--prompts: {path}: {error.strerror}") from None
    except (TypeError, ValueError) as error:
        raise PromptsError(f"--prompts: {path}: {str(error).splitlines()[0]}") from None
    if not found:
        raise PromptsError(f"--prompts: {path} has no prompt")
    return found


def _ids(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    messages = isinstance(prompt, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt
    )
    if not messages:
        raise ValueError(f"a line must be a text or a list of messages, not {prompt!r:.40}")
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))

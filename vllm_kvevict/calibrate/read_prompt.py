"""The prompt as text and tokens, and where pieces of text stand in it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt.

    Args:
        ids: Token ids.
        text: What was tokenized, the chat template's words included.
        offsets: [start, stop) characters of each token; None for tokenizers that know none.
        evict_at: Tokens before the eviction point, or None for the end of the prompt.

    """

    ids: list[int]
    text: str
    offsets: list[tuple[int, int]] | None
    evict_at: int | None = None

    @property
    def context(self) -> int:
        """Tokens in front of the eviction point."""
        return len(self.ids) if self.evict_at is None else self.evict_at

    def tokens(self, start: int, stop: int) -> range:
        """Tokens that hold some of the characters [start, stop).

        Raises:
            ValueError: The tokenizer knows no offsets.

        """
        if self.offsets is None:
            raise ValueError(
                "--find and --question need a tokenizer that knows the characters of each token "
                "(a fast one), and this model's does not; give the eviction point with --at"
            )
        inside = [i for i, (a, b) in enumerate(self.offsets) if a < stop and b > start]
        return range(inside[0], inside[-1] + 1) if inside else range(0)

    def find(self, text: str) -> list[range]:
        """Tokens of every occurrence of ``text``.

        Raises:
            ValueError: The prompt does not contain it.

        """
        found, start = [], self.text.find(text) if text else -1
        while start >= 0:
            found.append(self.tokens(start, start + len(text)))
            start = self.text.find(text, start + len(text))
        if not found:
            raise ValueError(f"--find {text!r}: the prompt does not contain this text")
        return found


def read_prompt(
    tokenizer: Any, text: str, question: str | None, at: int | None, chat: bool
) -> Prompt:
    """Tokenize a prompt as vLLM's completions do, or as its chat does.

    Args:
        tokenizer: The model's tokenizer.
        text: The prompt, or the context in front of ``question``.
        question: Text after the eviction point, separated by an empty line.
        at: Eviction point in tokens.
        chat: Whether the chat template goes around it, as one message of the user.

    Raises:
        ValueError: In one sentence, what is wrong.

    """
    if question is not None:
        question = question.strip()
    content = text if question is None else f"{text.rstrip()}\n\n{question}"
    rendered = _render_chat(tokenizer, content) if chat else content
    ids, offsets = _tokenize(tokenizer, rendered, special=not chat)
    prompt = Prompt(ids, rendered, offsets)
    if not ids:
        raise ValueError("the prompt is empty")
    if question is not None:
        if not text.strip():
            raise ValueError("--question: the prompt file has no text to put in front of it")
        context_end = len(rendered[: rendered.rindex(question)].rstrip())
        at = prompt.tokens(0, context_end).stop
    if at is not None and not 1 <= at <= len(ids):
        raise ValueError(f"--at: must be between 1 and the prompt's {len(ids)} tokens, not {at}")
    return Prompt(ids, rendered, offsets, at)


def _render_chat(tokenizer: Any, content: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("--chat: this model's tokenizer has no chat template")
    messages = [{"role": "user", "content": content}]
    rendered: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return rendered


def _tokenize(
    tokenizer: Any, text: str, special: bool
) -> tuple[list[int], list[tuple[int, int]] | None]:
    if not getattr(tokenizer, "is_fast", False):
        return list(tokenizer.encode(text, add_special_tokens=special)), None
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    return list(encoded["input_ids"]), [(a, b) for a, b in encoded["offset_mapping"]]

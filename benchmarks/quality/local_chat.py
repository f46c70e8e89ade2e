"""The chats of a model folder as its server renders them, without a server.

A base model has no chat template: its prompt is the messages' text, after the tokens with which its
tokenizer begins a text, and a line break at the end.
"""

from pathlib import Path

from transformers import AutoTokenizer


class LocalChat:
    """Template and tokenizer of a model's folder; the same methods as ``Endpoint`` has."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    @property
    def has_template(self) -> bool:
        """True if the model has a chat template, without which vLLM refuses chats."""
        return bool(self._tokenizer.chat_template)

    def tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat, ready for an answer."""
        if not self.has_template:
            text = "".join(f"{message['content']}\n" for message in messages)
            return list(self._tokenizer(text)["input_ids"])
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text alone, without special tokens."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

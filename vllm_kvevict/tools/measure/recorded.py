"""Recorded requests of an OpenAI API with their answers, as JSON Lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPLETION, CHAT, CONVERSATION, TOOLS = "completion", "chat", "conversation", "tools"
"""Kinds of requests, unless a line names its own."""


@dataclass(frozen=True)
class Recorded:
    """A request and the answer that its client got.

    Args:
        number: Line of the file, from 1.
        kind: Kind of the request: what the line says, or one of the kinds above.
        body: Body of the request.
        prompt: Token ids of the prompt if the response has them, else None.
        tokens: Token ids of the answer if the response has them, else None.
        text: The answer as text; empty if only its tokens are known.

    """

    number: int
    kind: str
    body: Mapping[str, Any]
    prompt: tuple[int, ...] | None
    tokens: tuple[int, ...] | None
    text: str

    @property
    def is_chat(self) -> bool:
        return "messages" in self.body


def read(path: Path) -> list[Recorded]:
    """Read a file with one JSON object on each line.

    ``request`` is the body of a completion or a chat completion, ``response`` the body of its
    answer. ``kind`` is optional: a name by which results are grouped.

    Raises:
        ValueError: In one sentence with the file and the line, what is wrong.
        OSError: The file cannot be read.

    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"--recorded: {path}, line {number} is not JSON: {error}") from None
        try:
            found.append(_recorded(number, row))
        except ValueError as error:
            raise ValueError(f"--recorded: {path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"--recorded: {path} has no requests")
    return found


def _recorded(number: int, row: Any) -> Recorded:
    if not isinstance(row, dict):
        raise ValueError("a line must be a JSON object with request and response")
    body = row.get("request")
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise ValueError(
            "request must be the body of a completion (prompt) or of a chat completion (messages)"
        )
    response = row.get("response")
    response = response if isinstance(response, dict) else {}
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError(
            "the answer is missing: response must be the body that the server answered, with "
            "choices; a stream is recorded as one body"
        )
    kind = row.get("kind")
    if kind is not None and (not isinstance(kind, str) or not kind):
        raise ValueError("kind must be a text that is not empty")
    if "messages" in body:
        _check_messages(body["messages"])
        prompt = _ids(response, "prompt_token_ids")
    else:
        prompt = _prompt_of(body["prompt"]) or _ids(choices[0], "prompt_token_ids")
    tokens = _ids(choices[0], "token_ids")
    return Recorded(
        number=number,
        kind=kind or _kind(body),
        body=body,
        prompt=prompt,
        tokens=tokens,
        text="" if tokens else _text(choices[0]),
    )


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError("messages must be a list of objects")
    if not messages:
        raise ValueError("messages must not be empty")
    for message in messages:
        parts = message.get("content")
        if isinstance(parts, list) and any(
            isinstance(part, dict) and part.get("type") not in ("text", None) for part in parts
        ):
            raise ValueError("requests with images or sounds cannot be scored; leave the line out")


def _prompt_of(prompt: Any) -> tuple[int, ...] | None:
    """Return the token ids of a completion's prompt; None for a text."""
    if isinstance(prompt, str):
        return None
    if (
        not isinstance(prompt, list)
        or not prompt
        or not all(isinstance(token, int) for token in prompt)
    ):
        raise ValueError("prompt must be one text, or one list of token ids")
    return tuple(prompt)


def _ids(holder: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    """Return token ids of a response, as with ``return_token_ids``; None if it has none."""
    found = holder.get(key)
    if not isinstance(found, list) or not found:
        return None
    if not all(isinstance(token, int) for token in found):
        raise ValueError(f"{key} must be a list of token ids")
    return tuple(found)


def _text(choice: Mapping[str, Any]) -> str:
    message = choice.get("message")
    found = message.get("content") if isinstance(message, Mapping) else choice.get("text")
    hidden = isinstance(message, Mapping) and any(
        message.get(key) for key in ("tool_calls", "reasoning", "reasoning_content")
    )
    if hidden or not isinstance(found, str) or not found:
        raise ValueError(
            "the answer is missing: the first of choices has no text that is the whole answer; "
            "record with return_token_ids, which also keeps calls of tools and reasoning"
        )
    return found


def _kind(body: Mapping[str, Any]) -> str:
    if "messages" not in body:
        return COMPLETION
    if body.get("tools"):
        return TOOLS
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    return CONVERSATION if any(one.get("role") == "assistant" for one in messages) else CHAT

"""Conversations with a server: each turn sends all that was said before."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from openai import OpenAI

from benchmarks.chat.dialogue import Dialogue
from benchmarks.server import Server


@dataclass(frozen=True)
class Answer:
    """What a client saw of one turn: the text, seconds, and tokens as ``usage`` counts them."""

    text: str
    ttft_s: float
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Conversation:
    """A dialogue as far as it was answered."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.dialogue = dialogue
        self.answers: list[Answer] = []

    def ask(self, client: OpenAI, model: str, xargs: dict[str, Any]) -> Answer:
        """Send the next turn and wait for its whole answer.

        Summaries have all their tokens, so that every server decodes as many of them.

        Raises:
            openai.OpenAIError: The server refused the request, or could not be reached.

        """
        question = self.dialogue.questions[len(self.answers)]
        body: dict[str, Any] = {
            "model": model,
            "messages": self.dialogue.messages([answer.text for answer in self.answers]),
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": {"vllm_xargs": xargs} if xargs else {},
        }
        if question.number is None:
            body["extra_body"]["min_tokens"] = question.max_tokens
        began, first, parts, usage = time.perf_counter(), None, [], None
        stream = client.chat.completions.create(**body)
        for chunk in stream:
            usage = chunk.usage or usage
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                first = first or time.perf_counter()
                parts.append(text)
        ended = time.perf_counter()
        assert usage is not None and usage.prompt_tokens_details is not None
        answer = Answer(
            "".join(parts), (first or ended) - began, ended - began, usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens or 0, usage.completion_tokens,
        )  # fmt: skip
        self.answers.append(answer)
        return answer

    def as_dict(self) -> list[dict[str, Any]]:
        """The answers, for a result file."""
        return [asdict(answer) for answer in self.answers]


def converse(
    server: Server,
    conversations: Sequence[Conversation],
    turns: int,
    at_once: int,
    think_s: float,
    xargs: dict[str, Any],
    answered: Callable[[], object] = lambda: None,
) -> float:
    """Let users go through the next turns of all conversations.

    A user has one conversation after the other, and waits between the turns of one.

    Args:
        server: A running server.
        conversations: In the order in which they begin.
        turns: Next turns of each.
        at_once: Users.
        think_s: Seconds between an answer and the next question.
        xargs: ``vllm_xargs`` of every request; none are sent where it is empty.
        answered: Called after each answer.

    Returns:
        Seconds from the first question to the last answer.

    """
    # A queue of minutes is what is measured here; a retry would be counted twice.
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=3600, max_retries=0)

    def user(conversation: Conversation) -> None:
        for turn in range(turns):
            if turn:
                time.sleep(think_s)
            conversation.ask(client, server.model, xargs)
            answered()

    began = time.perf_counter()
    with client, ThreadPoolExecutor(at_once) as users:
        list(users.map(user, conversations))
    return time.perf_counter() - began

"""Requests and answers of the tests of reported faults."""

import itertools
import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.server import Server
from tests.e2e.faults.test_lifecycle import Stream
from tests.e2e.test_own_settings import asks
from tests.e2e.test_own_settings_server import settled
from tests.e2e.test_server import events
from tests.models import random_prompt, random_text

LIMIT = 1024
NEVER = asks("none")
DOCUMENT = 300
"""Tokens before the eviction point of requests that share a store."""
NEW = 50
"""Tokens of most answers: with an interval of 32 one eviction in decode."""
POINT = asks(at=DOCUMENT, interval=0)
MESSAGES = [dict(role="user", content=random_text(120, seed=3))]
FRESH = itertools.count(10_000)
"""Seeds of prompts that were never sent."""
ONE_CHOICE = dict(temperature=1, top_k=1)
"""Greedy for vLLM too, which takes several answers at temperature 0 for a mistake."""


@contextmanager
def evictions(server: Server, fewest: int) -> Iterator[None]:
    """The requests inside cause at least so many evictions; with 0, exactly none."""
    before = settled(server)["evictions"]
    yield
    caused = settled(server)["evictions"] - before
    assert caused >= fewest if fewest else caused == 0, caused


def body(prompt: Any, tokens: int = NEW, **options: Any) -> dict[str, Any]:
    """A greedy completion request for exactly ``tokens`` tokens."""
    sampling = dict(temperature=0, max_tokens=tokens, ignore_eos=True, return_token_ids=True)
    return dict(model="tiny", prompt=prompt) | sampling | options


def post(server: Server, prompt: Any, tokens: int = NEW, **options: Any) -> dict[str, Any]:
    return server.post("/v1/completions", body(prompt, tokens, **options))


def post_all(server: Server, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to completion requests that are sent at once."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda one: server.post("/v1/completions", one), requests))


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def cached(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that were not computed."""
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def switch(server: Server, path: str) -> dict[str, Any]:
    return server.post(path, {})


def turn_over(server: Server) -> None:
    """Fill the KV cache with other prompts, so that no block of an earlier one is left."""
    for _ in range(3):
        prompt = random_prompt(LIMIT - 1, seed=next(FRESH))
        post(server, prompt, 1, vllm_xargs=NEVER)


def prompt_logprobs(answer: dict[str, Any], prompt: list[int]) -> list[float]:
    """Log-probabilities of the prompt's tokens but the first, which has none."""
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None and len(others) == len(prompt) - 1
    return [entry[str(t)]["logprob"] for entry, t in zip(others, prompt[1:], strict=True)]


def chat_body(**options: Any) -> dict[str, Any]:
    content = body(None) | dict(messages=MESSAGES) | options
    del content["prompt"]
    return content


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed(server: Server, request: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream, and its chunks."""
    chunks = list(events(server, "/v1/completions", request))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices), chunks


def status_of(server: Server, path: str) -> str:
    with urllib.request.urlopen(server.url + path, timeout=60) as answer:
        return answer.read().decode()


def ids_of(client: Stream) -> list[int]:
    """Token ids of a stream that has ended."""
    found = [json.loads(line[6:]) for line in client.lines if line.startswith(b"data: {")]
    return [t for chunk in found for c in chunk["choices"] for t in c["token_ids"] or []]


def leave(server: Server, request: dict[str, Any], after_s: float) -> None:
    """Send a whole request and close the connection before its answer."""
    data = json.dumps(request).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head.encode() + data)
        time.sleep(after_s)


def spoken(response: dict[str, Any]) -> str:
    return "".join(
        part["text"]
        for item in response["output"] if item["type"] == "message"
        for part in item["content"]
    )  # fmt: skip

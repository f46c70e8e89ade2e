"""Requests with their own settings through HTTP, on a server of two API processes."""

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.server import Server
from tests.e2e.test_own_settings import asks
from tests.e2e.test_server import BASE, GREEDY, NEW_TOKENS, complete, events, wait_for
from tests.models import random_prompt, random_text
from tests.oracles.engine import engine
from tests.oracles.masked import MaskedModel, check_tokens

SETTINGS = dict(policy="snapkv", budget=96, interval=32, allow="streaming-llm,subgen-stream")
PROMPT = random_prompt(400, seed=11)
CASES = [{}, asks(at=300, interval=0), asks("streaming-llm", at="-20"), asks(budget="50%")]
CASES += [asks("subgen-stream")]
PROMPT_TEXT = random_text(120, seed=3)
MESSAGES = [dict(role="user", content=PROMPT_TEXT)]

BAD: list[tuple[dict[str, Any], str]] = [
    (asks("none"), "(snapkv, streaming-llm, subgen-stream), not 'none'"),
    (asks("ada-snapkv"), "(snapkv, streaming-llm, subgen-stream), not 'ada-snapkv'"),
    (asks(budget=32), "leaves no room beyond the observation window of 32 tokens"),
    (asks(budget="half"), "give tokens (1024) or a share (25%)"),
    (asks(interval=-1), "kv_eviction_interval must be at least 0"),
    (asks(interval=[1]), "kv_eviction_interval must be a whole number"),
    (asks(at=0), "kv_eviction_at must be between 1 and the prompt's"),
    (asks(at=5000), "kv_eviction_at must be between 1 and the prompt's"),
    (asks(point=3), "unknown key 'kv_eviction_point'"),
]
BAD_ONLY_IN: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", asks(at={"message": 0}), "needs a chat with at least two messages"),
    ("chat/completions", asks(at={"text": "nowhere"}), "stands nowhere in the chat"),
    ("chat/completions", asks(at={"end": 1}), 'must be prompt tokens or {"message": 0} or'),
    ("completions", asks(at={"text": "nowhere"}), "stands nowhere in the prompt"),
    ("completions", asks(at={"message": 0}), 'must be prompt tokens or {"text": "..."} here'),
    ("responses", asks(at={"message": 0}), "as a mapping is for chat completions"),
    ("chat/completions/batch", asks(at={"message": 0}), "as a mapping is for chat completions"),
    ("chat/completions/batch", asks(budget="half"), "give tokens (1024) or a share (25%)"),
]


@pytest.fixture(scope="module")
def truth(tiny_model) -> list[list[int]]:
    """Completions of the cases, from an engine that the oracle confirms."""
    oracle = MaskedModel(tiny_model)
    with engine(tiny_model, SETTINGS, max_model_len=2048) as run:
        prompts = [PROMPT] * len(CASES)
        outputs = run.generate(prompts, NEW_TOKENS, CASES)
        for output, lives in zip(outputs, run.lives(), strict=True):
            assert check_tokens(oracle, PROMPT, output, lives) == (NEW_TOKENS, NEW_TOKENS)
            assert lives[0].evictions
    assert len({tuple(output) for output in outputs}) == len(CASES), "settings changed nothing"
    return outputs


@pytest.fixture(scope="module")
def server(tiny_model, truth, tmp_path_factory) -> Iterator[Server]:
    arguments = [
        *BASE, "--served-model-name", "tiny", "--api-server-count", "2",
        "--kv-eviction", "snapkv", "--kv-eviction-budget", "96", "--kv-eviction-interval", "32",
        "--kv-eviction-allow", "streaming-llm,subgen-stream",
        "--kv-eviction-shared-blocks", "evict", "--enable-prompt-tokens-details",
    ]  # fmt: skip
    with Server(tiny_model, arguments, tmp_path_factory.mktemp("server") / "log") as server:
        yield server


def refusal(server: Server, path: str, body: dict[str, Any]) -> str:
    """The message of an HTTP 400."""
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    error = json.load(caught.value)["error"]
    assert caught.value.code == error["code"] == 400
    return error["message"]


def test_completions_with_their_own_settings(server, truth):
    with ThreadPoolExecutor(8) as threads:
        answers = list(
            threads.map(lambda asked: complete(server, PROMPT, vllm_xargs=asked)[0], CASES * 2)
        )
    assert [answer["token_ids"] for answer in answers] == truth * 2


QUIET = 3
"""Half seconds without a new report, after which a busy machine has none on its way either."""


def settled(server: Server, evictions: float = 0) -> dict[str, float]:
    """Return the eviction counters when no request runs and all front ends have had their reports.

    Args:
        server: Gets no request meanwhile.
        evictions: As many must be reported; what is missing is waited for.

    """
    wait_for(server, "vllm:num_requests_running", 0)
    deadline, quiet, found = time.monotonic() + 60, 0, server.evictions()
    while quiet < QUIET or found["evictions"] < evictions:
        assert time.monotonic() < deadline, f"{found['evictions']} evictions, not {evictions}"
        time.sleep(0.5)
        quiet = quiet + 1 if found == (found := server.evictions()) else 0
    return found


def test_chat_with_its_own_settings(server):
    body = dict(model="tiny", messages=MESSAGES) | GREEDY
    before = settled(server)["evictions"]
    plain = server.post("/v1/chat/completions", body)
    mine = server.post("/v1/chat/completions", body | dict(vllm_xargs=asks(at=-4, interval=0)))
    assert settled(server, before + 3 + 1)["evictions"] - before == 3 + 1
    assert mine["choices"][0]["token_ids"] != plain["choices"][0]["token_ids"]


def evicting(
    server: Server, path: str, body: dict[str, Any], *points: dict[str, Any] | int
) -> list[list[int]]:
    """Token ids of the answers at eviction points, each of which evicts or takes what is kept."""

    def counted(found: dict[str, float]) -> float:
        return found["evictions"] + found["stores_reused"]

    answers, before = [], counted(settled(server))
    for number, point in enumerate(points, 1):
        asked = body | GREEDY | dict(vllm_xargs=asks(at=point, interval=0))
        answers.append(server.post(path, asked)["choices"][0]["token_ids"])
        deadline = time.monotonic() + 60
        while counted(server.evictions()) < before + number:
            assert time.monotonic() < deadline, f"nothing was evicted or taken at {point}"
            time.sleep(0.05)
    assert counted(settled(server)) == before + len(points)
    return answers


def test_tenants_share_a_context_under_one_salt_and_one_budget(server):
    document = random_prompt(300, seed=77)
    xargs = asks(at=len(document), interval=0)

    def taken(question: int, **options: Any) -> int:
        """Tokens of the document that a question did not compute."""
        prompt = document + random_prompt(20, seed=question)
        body = dict(model="tiny", prompt=prompt, max_tokens=1, vllm_xargs=xargs) | options
        usage = server.post("/v1/completions", body)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    before = server.metric("vllm_kvevict:reused_stores_total")
    assert [taken(1, cache_salt="a"), taken(2, cache_salt="a")] == [0, 300]
    assert [taken(3, cache_salt="b"), taken(4, cache_salt="b")] == [0, 300]
    assert [taken(5), taken(6)] == [0, 300]
    # The prefix is cached, but for the window; the store is another one.
    other = xargs | asks(budget=128)
    assert [taken(7, vllm_xargs=other), taken(8, vllm_xargs=other)] == [256, 300]
    other = xargs | asks("streaming-llm")
    assert taken(9, vllm_xargs=other) < 300 == taken(10, vllm_xargs=other)
    assert taken(11, cache_salt="a") == 300
    assert server.metric("vllm_kvevict:reused_stores_total") - before == 6


def test_a_context_named_by_message_or_text_is_the_point_in_tokens(server):
    turns = [*MESSAGES, dict(role="assistant", content="yes"), dict(role="user", content="who?")]
    chat = dict(model="tiny", messages=turns)
    part = dict(model="tiny", messages=turns[:2], add_generation_prompt=False)
    whole = server.post("/tokenize", chat)["tokens"]
    end = server.post("/tokenize", part)["tokens"]
    assert end == whole[: len(end)]
    path = "/v1/chat/completions"
    named, counted, other = evicting(server, path, chat, {"message": 1}, len(end), -1)
    assert named == counted != other
    prompt = dict(model="tiny", prompt=PROMPT_TEXT + " who?")
    at = len(server.post("/tokenize", dict(model="tiny", prompt=PROMPT_TEXT))["tokens"])
    path = "/v1/completions"
    named, counted = evicting(server, path, prompt, {"text": " who?"}, at)
    assert named == counted


@pytest.mark.nightly
def test_a_text_inside_a_message_of_a_chat_is_the_point_in_tokens(server):
    """Context and question in one message: the question's text ends the context."""
    chat = dict(model="tiny", messages=[dict(role="user", content=PROMPT_TEXT + " who?")])
    whole = server.post("/tokenize", chat)["tokens"]
    part = chat | dict(messages=MESSAGES, add_generation_prompt=False)
    at = len(server.post("/tokenize", part)["tokens"])
    assert whole[:at] == server.post("/tokenize", part)["tokens"], "its template closes no message"
    path = "/v1/chat/completions"
    named, counted, other = evicting(server, path, chat, {"text": " who?"}, at, -1)
    assert named == counted != other


@pytest.mark.parametrize("path, asked, reason", BAD_ONLY_IN)
def test_points_that_an_interface_does_not_take(server, path, asked, reason):
    content = {
        "completions": dict(prompt=PROMPT_TEXT),
        "chat/completions": dict(messages=MESSAGES),
        "chat/completions/batch": dict(messages=[MESSAGES, MESSAGES]),
        "responses": dict(input=PROMPT_TEXT),
    }[path]
    assert reason in refusal(server, f"/v1/{path}", dict(model="tiny", vllm_xargs=asked) | content)


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_bad_values_are_refused_while_another_stream_goes_on(server, truth, stream):
    body = dict(model="tiny", prompt=PROMPT, vllm_xargs=CASES[1]) | GREEDY
    undisturbed = events(server, "/v1/completions", body)
    chunks = [next(undisturbed)]
    for asked, reason in BAD:
        for path, content in (
            ("/v1/completions", dict(prompt=PROMPT)),
            # The last of several prompts is enough.
            ("/v1/completions", dict(prompt=[PROMPT[:350], PROMPT])),
            ("/v1/chat/completions", dict(messages=MESSAGES)),
            ("/v1/responses", dict(input=MESSAGES[0]["content"])),
        ):
            options = dict(model="tiny", vllm_xargs=asked, stream=stream)
            message = refusal(server, path, content | options)
            assert reason in message and message.startswith("KV eviction: ")
            assert "\n" not in message
    chunks += undisturbed
    ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"] or []]
    assert ids == truth[1]
    log = server.log.read_text()
    assert "the server's settings apply" not in log and "Traceback" not in log


def test_a_point_in_a_seeded_prompt_is_refused(server):
    """It would be computed in two parts, which ends vLLM's CPU worker, in stock too."""
    seeded = dict(model="tiny", prompt=PROMPT, seed=1, temperature=1.0, max_tokens=4)
    message = refusal(server, "/v1/completions", seeded | dict(vllm_xargs=asks(at=-4)))
    assert "kv_eviction_at and seed cannot be combined" in message
    assert server.post("/v1/completions", seeded)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("asked", [asks(budget="10%"), asks("nonsense"), asks(at={"message": 0})])
def test_settings_for_a_beam_search_are_refused_by_name(server, asked):
    common = dict(model="tiny", use_beam_search=True, n=2, max_tokens=4, vllm_xargs=asked)
    (key,) = asked
    chat = dict(messages=MESSAGES * 2)
    for path, content in (
        ("completions", dict(prompt=PROMPT)),
        ("chat/completions", chat),
        ("chat/completions", chat | dict(stream=True)),
    ):
        message = refusal(server, f"/v1/{path}", common | content)
        assert f"{key} cannot be combined with use_beam_search" in message


@pytest.mark.nightly
def test_a_beam_search_is_not_evicted(server):
    before = settled(server)["evictions"]
    body = dict(model="tiny", use_beam_search=True, n=2, max_tokens=40, prompt=PROMPT)
    beams = server.post("/v1/completions", body)["choices"]
    assert len({beam["text"] for beam in beams}) == 2
    assert settled(server)["evictions"] == before


def test_each_api_server_refuses(server):
    """One of the two is stopped, so the other must answer."""
    found = re.findall(r"\(ApiServer_\d pid=(\d+)\)", server.log.read_text())
    pids = sorted({int(pid) for pid in found})
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        try:
            body = dict(model="tiny", prompt=PROMPT, vllm_xargs=asks("none"))
            assert "'none'" in refusal(server, "/v1/completions", body)
        finally:
            os.kill(pid, signal.SIGCONT)

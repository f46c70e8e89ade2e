"""Faults that users of similar systems have reported, tried over HTTP on one evicting server.

The server is in development mode, has 63 blocks of 32 tokens and keeps stores in host memory.
An expected answer comes from the same server: from a request that is never evicted, from the same
request alone, or from the same request without a stream.
"""

import itertools
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.server import Server
from tests.e2e.faults.conftest import EVICTION, PATIENCE_S, arguments
from tests.e2e.faults.test_malformed import status
from tests.e2e.test_own_settings import asks
from tests.e2e.test_own_settings_server import refusal, settled
from tests.e2e.test_server import events, wait_for
from tests.models import random_prompt, random_text

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

LIMIT = 1024
NEVER = asks("none")
DOCUMENT = 300
"""Tokens before the eviction point of requests that share a store."""
NEW = 50
"""Tokens of most answers: with an interval of 32 one eviction in decode."""
POINT = asks(at=DOCUMENT, interval=0)
GRAMMARS = json.dumps(dict(backend="xgrammar", disable_any_whitespace=True))
ARGUMENTS = [
    *arguments(64, LIMIT), *EVICTION, "--kv-eviction-store-memory", "64M",
    "--enable-prompt-tokens-details", "--structured-outputs-config", GRAMMARS,
]  # fmt: skip
GLYPHS = "é漢😀"
MESSAGES = [dict(role="user", content=random_text(120, seed=3))]
FRESH = itertools.count(10_000)
"""Seeds of prompts that were never sent."""


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory) -> Iterator[Server]:
    env = dict(VLLM_SERVER_DEV_MODE="1", VLLM_ENABLE_RESPONSES_API_STORE="1")
    log = tmp_path_factory.mktemp("reports") / "log"
    with Server(tiny_model, ARGUMENTS, log, PATIENCE_S, env) as server:
        yield server
        wait_for(server, "vllm:kv_cache_usage_perc", 0)
        assert "Traceback" not in server.log.read_text()


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


def turn_over(server: Server) -> None:
    """Fill the KV cache with other prompts, so that no block of an earlier one is left."""
    for _ in range(3):
        prompt = random_prompt(LIMIT - 1, seed=next(FRESH))
        post(server, prompt, 1, vllm_xargs=NEVER)


# Lengths


def test_an_answer_fills_the_context_and_no_more(server):
    prompt = random_prompt(LIMIT - 130, seed=1)
    assert status(server, "/v1/completions", body(random_prompt(LIMIT, seed=1), 1))[0] == 400
    # At the limit, beyond it and without any, the answer goes on to the end of the context.
    chat = dict(model="tiny", messages=[dict(role="user", content=random_text(390, seed=4))])
    chat |= dict(temperature=0, ignore_eos=True)
    with evictions(server, 6):
        found = post_all(server, [body(prompt, 130), body(prompt, 131, cache_salt="other")])
        found.append(server.post("/v1/chat/completions", chat))
    assert tokens_of(found[0]) == tokens_of(found[1])
    for answer in found:
        assert answer["usage"]["total_tokens"] == LIMIT
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_truncated_prompt_is_the_prompt_that_remains(server):
    prompt = random_prompt(500, seed=2)
    requests = []
    for side, rest in (("left", prompt[-200:]), ("right", prompt[:200])):
        cut = dict(truncate_prompt_tokens=200, truncation_side=side)
        for asked in ({}, asks(at=-20, interval=0)):
            requests.append(body(prompt, vllm_xargs=asked, cache_salt="cut", **cut))
            requests.append(body(rest, vllm_xargs=asked, cache_salt="whole"))
        message = refusal(server, "/v1/completions", body(prompt, vllm_xargs=asks(at=201), **cut))
        assert "kv_eviction_at must be between 1 and the prompt's" in message
    with evictions(server, len(requests)):
        found = post_all(server, requests)
    assert {answer["usage"]["prompt_tokens"] for answer in found} == {200}
    answers = [tokens_of(answer) for answer in found]
    assert answers[::2] == answers[1::2]
    assert len({tuple(tokens) for tokens in answers}) == 4


def test_prompts_of_no_and_of_one_token(server):
    for empty in ([], [[]]):
        code, text = status(server, "/v1/completions", body(empty, vllm_xargs=asks(at=1)))
        assert code == 400, text
    cases: list[dict[str, Any]] = [{}, asks(at=1), asks(budget=4096), NEVER]
    with evictions(server, 3):
        found = post_all(server, [body([9], 180, vllm_xargs=asked) for asked in cases])
    plain, pointed, covered, whole = map(tokens_of, found)
    assert {answer["usage"]["prompt_tokens"] for answer in found} == {1}
    assert pointed == plain != whole == covered
    assert whole[:96] == plain[:96], "within the budget"


# Log-probabilities


def prompt_logprobs(answer: dict[str, Any], prompt: list[int]) -> list[float]:
    """Log-probabilities of the prompt's tokens but the first, which has none."""
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None and len(others) == len(prompt) - 1
    return [entry[str(t)]["logprob"] for entry, t in zip(others, prompt[1:], strict=True)]


def test_echo_gives_the_prompt_of_a_request_that_evicts(server):
    prompt, options = random_prompt(350, seed=5), dict(echo=True, logprobs=1)
    expected = post(server, prompt, NEW, vllm_xargs=NEVER, **options)["choices"][0]
    alone = post(server, prompt)["choices"][0]
    for _ in range(2):  # the second time the prompt is in the prefix cache
        with evictions(server, 2):
            found = post(server, prompt, NEW, **options)["choices"][0]
        first, *others = found["logprobs"]["token_logprobs"]
        assert first is None and len(others) == 350 + NEW - 1
        # The prompt is computed before it is evicted, and so is the logit of the first new token.
        assert others[:350] == pytest.approx(
            expected["logprobs"]["token_logprobs"][1:351], abs=1e-3
        )
        assert all(math.isfinite(value) for value in others)
        assert found["token_ids"] == alone["token_ids"] != expected["token_ids"]
        assert found["text"].endswith(alone["text"])


def test_prompt_logprobs_are_computed_over_a_shared_store(server):
    """A store has no logits: who wants those of the prompt computes it, whoever published it."""
    prompt = random_prompt(DOCUMENT + 40, seed=6)
    whole = prompt_logprobs(post(server, prompt, vllm_xargs=NEVER, prompt_logprobs=0), prompt)
    published = post(server, prompt, vllm_xargs=POINT)
    assert cached(post(server, prompt, vllm_xargs=POINT)) >= DOCUMENT
    with evictions(server, 1):
        answer = post(server, prompt, vllm_xargs=POINT, prompt_logprobs=0)
    assert cached(answer) == 0 and tokens_of(answer) == tokens_of(published)
    found = prompt_logprobs(answer, prompt)
    assert found[:DOCUMENT] == pytest.approx(whole[:DOCUMENT], abs=1e-3)
    # What follows the point sees the evicted cache.
    assert found[DOCUMENT:] != pytest.approx(whole[DOCUMENT:], abs=1e-3)


# Beams


def test_beams_evict_nothing_and_take_no_keys(server):
    prompt = random_prompt(200, seed=8)
    beam = dict(use_beam_search=True, n=1, stream=False)
    for path, content in (("completions", body(prompt)), ("chat/completions", chat_body())):
        for asked in (asks(budget=64), asks("none"), asks(at=10), asks("nonsense")):
            message = refusal(server, f"/v1/{path}", content | beam | dict(vllm_xargs=asked))
            assert f"{next(iter(asked))} cannot be combined with use_beam_search" in message
    # A search of one beam is greedy.
    with evictions(server, 0):
        for path, content in (("completions", body(prompt)), ("chat/completions", chat_body())):
            found = server.post(f"/v1/{path}", content | beam)
            whole = server.post(f"/v1/{path}", content | dict(vllm_xargs=NEVER))
            assert text_of(found) == text_of(whole)
        two = server.post("/v1/completions", body(prompt, 20) | beam | dict(n=2))["choices"]
    assert len({one["text"] for one in two}) == 2


def chat_body(**options: Any) -> dict[str, Any]:
    content = body(None) | dict(messages=MESSAGES) | options
    del content["prompt"]
    return content


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


# Text


def streamed(server: Server, request: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream, and its chunks."""
    chunks = list(events(server, "/v1/completions", request))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices), chunks


@pytest.mark.parametrize("asked", [{}, asks("tova", budget=64)], ids=["", "tova"])
def test_characters_of_several_bytes_and_stops_across_evictions(server, asked):
    """Each character is two to four tokens, and evictions fall between them."""
    prompt = random_prompt(90, seed=9)
    shape = dict(structured_outputs=dict(regex=f"[{GLYPHS}]{{40}}"), ignore_eos=False)
    request = body(prompt, 200, vllm_xargs=asked, **shape)
    covered = [request | dict(vllm_xargs=xargs) for xargs in (NEVER, asks(budget=4096))]
    with evictions(server, 2):
        whole, never, within = map(text_of, post_all(server, [request, *covered]))
        text, chunks = streamed(server, request)
    assert text == whole and len(whole) == 40 and set(whole) <= set(GLYPHS)
    assert all("\ufffd" not in one["choices"][0]["text"] for one in chunks if one["choices"])
    assert never == within != whole
    # The pair of characters that comes first as late as any.
    stop = max((whole[n : n + 2] for n in range(39)), key=whole.index)
    requests = [
        request | dict(stop=[stop], include_stop_str_in_output=included)
        for included in (False, True)
    ]
    for included, answer in enumerate(post_all(server, requests)):
        assert answer["choices"][0]["stop_reason"] == stop
        assert text_of(answer) == whole[: whole.index(stop) + included * len(stop)]
    assert streamed(server, requests[0])[0] == whole[: whole.index(stop)]


# Tenants


def test_a_store_outside_the_cache_is_its_tenants_alone(server):
    prompt = random_prompt(DOCUMENT + 40, seed=11)
    restored = lambda: server.metric("vllm_kvevict:restored_stores_total")  # noqa: E731
    ask = lambda salt: post(server, prompt, vllm_xargs=POINT, **salt)  # noqa: E731
    mine, other, nobody = dict(cache_salt="mine"), dict(cache_salt="other"), {}
    with evictions(server, 1):
        first = ask(mine)
    assert cached(first) == 0
    turn_over(server)
    before = restored()
    for salt in (other, nobody):
        answer = ask(salt)
        assert cached(answer) == 0 and restored() == before
        assert tokens_of(answer) == tokens_of(first)
    again = ask(mine)
    assert restored() == before + 1 and cached(again) == DOCUMENT
    assert tokens_of(again) == tokens_of(first)

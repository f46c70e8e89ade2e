"""Faults that users of similar systems have reported, tried over HTTP on one evicting server.

The server is in development mode, has 63 blocks of 32 tokens and keeps stores in host memory.
An expected answer comes from the same server: from a request that is never evicted, from the same
request alone, or from the same request without a stream.
"""

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.server import Server
from tests import forked
from tests.e2e.faults.conftest import EVICTION, PATIENCE_S, arguments
from tests.e2e.faults.reports import (
    DOCUMENT,
    LIMIT,
    MESSAGES,
    NEVER,
    NEW,
    ONE_CHOICE,
    POINT,
    body,
    cached,
    chat_body,
    evictions,
    ids_of,
    leave,
    post,
    post_all,
    prompt_logprobs,
    spoken,
    status_of,
    streamed,
    switch,
    text_of,
    tokens_of,
    turn_over,
)
from tests.e2e.faults.test_lifecycle import Stream
from tests.e2e.faults.test_malformed import status
from tests.e2e.test_own_settings import asks
from tests.e2e.test_own_settings_server import refusal
from tests.e2e.test_server import SCHEMA, events, wait_for
from tests.models import random_prompt, random_text

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

GRAMMARS = json.dumps(dict(backend="xgrammar", disable_any_whitespace=True))
ARGUMENTS = [
    *arguments(64, LIMIT), *EVICTION, "--kv-eviction-store-memory", "64M",
    "--enable-prompt-tokens-details", "--structured-outputs-config", GRAMMARS,
]  # fmt: skip
GLYPHS = "é漢😀"


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory) -> Iterator[Server]:
    env = dict(VLLM_SERVER_DEV_MODE="1", VLLM_ENABLE_RESPONSES_API_STORE="1")
    log = tmp_path_factory.mktemp("reports") / "log"
    with Server(tiny_model, ARGUMENTS, log, PATIENCE_S, env) as server:
        yield server
        wait_for(server, "vllm:kv_cache_usage_perc", 0)
        assert "Traceback" not in server.log.read_text()


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


# Several answers


@pytest.mark.parametrize("asked", [{}, POINT], ids=["", "at a point"])
def test_several_answers_to_one_prompt(server, asked):
    prompt = random_prompt(DOCUMENT + 30, seed=7)
    with evictions(server, 1):
        alone = post(server, prompt, vllm_xargs=asked)
        same = post(server, prompt, vllm_xargs=asked, n=4, **ONE_CHOICE)
    assert [one["token_ids"] for one in same["choices"]] == [tokens_of(alone)] * 4
    assert same["usage"]["completion_tokens"] == 4 * NEW
    with evictions(server, 0 if asked else 4):
        drawn = post(server, prompt, vllm_xargs=asked, n=4, temperature=1.5, logprobs=0)["choices"]
    assert len({tuple(one["token_ids"]) for one in drawn}) == 4
    best = max(drawn, key=lambda one: sum(one["logprobs"]["token_logprobs"]))
    assert len(best["token_ids"]) == NEW and best["finish_reason"] == "length"


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


def test_beams_are_those_of_stock_vllm(server, tiny_model, tmp_path):
    chat = chat_body(max_tokens=20) | dict(use_beam_search=True, n=3)
    requests = [("chat/completions", chat)] + [
        ("completions", body(random_prompt(length, seed=70 + n), new) | dict(beams, n=n))
        for n, length, new in ((2, 150, 60), (4, 300, 30), (3, 40, 120))
        for beams in (dict(use_beam_search=True), dict(use_beam_search=True, length_penalty=0.5))
    ]

    def searched(server: Server) -> list[list[str]]:
        answers = [server.post(f"/v1/{path}", content) for path, content in requests]
        return [[text_of(dict(choices=[one])) for one in each["choices"]] for each in answers]

    plain = arguments(64, LIMIT)
    with Server(tiny_model, plain, tmp_path / "log", PATIENCE_S, dict(VLLM_PLUGINS="")) as stock:
        expected = searched(stock)
    with evictions(server, 0):
        assert searched(server) == expected
    assert all(len(set(beams)) == len(beams) for beams in expected)


# Text


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


# Usage


def test_usage_of_streams(server):
    """Cached tokens are tokens of the prompt, and a stream says what the whole answer says."""
    prompt = random_prompt(DOCUMENT + 50, seed=10)
    reported = dict(stream_options=dict(include_usage=True, continuous_usage_stats=True))
    hits = []
    with evictions(server, 6):
        for asked in ({}, POINT, asks(budget="30%")):
            for n in (1, 1, 2):
                request = body(prompt, vllm_xargs=asked, n=n, **ONE_CHOICE) | reported
                _, chunks = streamed(server, request)
                *others, last = [chunk["usage"] for chunk in chunks]
                assert chunks[-1]["choices"] == []
                details = last["prompt_tokens_details"] or {}
                hits.append(details.get("cached_tokens") or 0)
                assert 0 <= hits[-1] <= last["prompt_tokens"] == len(prompt)
                assert last["completion_tokens"] == n * NEW
                assert last["total_tokens"] == len(prompt) + n * NEW
                assert all(usage["prompt_tokens"] == len(prompt) for usage in others)
                counts = [usage["completion_tokens"] for usage in others]
                assert max(counts) <= n * NEW
                assert n > 1 or counts == sorted(counts)
    assert hits[0] == 0 and hits[1] > 0
    assert DOCUMENT <= hits[4] < len(prompt), "the store, and what followed it"
    whole = post(server, prompt, vllm_xargs=POINT)
    assert cached(whole) == hits[4]


# Preemption

PROCESSORS: list[dict[str, Any]] = [
    dict(repetition_penalty=1.3),
    dict(frequency_penalty=1.0, presence_penalty=0.5),
    dict(logit_bias={"40": 3.0, "41": -100.0}),
    dict(allowed_token_ids=list(range(100, 400))),
    dict(bad_words=["ba", "na"]),
    dict(min_tokens=160, stop_token_ids=list(range(10, 500))),
]


def test_sampling_and_grammars_survive_preemptions(server):
    """Penalties count, and grammars go on, from where a preempted request was.

    Requests that are never evicted are exact; all others must be what they were asked to be.
    """
    growing = [
        body(random_prompt(8 + n, seed=500 + n), 200, vllm_xargs=NEVER, **processors)
        for n, processors in enumerate(PROCESSORS * 3)
    ]
    shape = dict(type="json_schema", json_schema=dict(name="two", schema=SCHEMA, strict=True))
    grammar = [
        chat_body(
            messages=[dict(role="user", content=random_text(5 if asked == NEVER else 120, seed=n))],
            response_format=shape, ignore_eos=False, max_tokens=300, vllm_xargs=asked,
        )
        for n, asked in enumerate([{}, NEVER, asks(budget=64), NEVER, NEVER, asks("tova")])
    ]  # fmt: skip
    load = [("completions", one) for one in growing] + [("chat/completions", g) for g in grammar]

    def answer(one: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        return server.post(f"/v1/{one[0]}", one[1])

    preempted = server.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(4) as threads:
        alone = list(threads.map(answer, load))
    assert server.metric("vllm:num_preemptions_total") == preempted, "four at once fit"
    with evictions(server, 3), ThreadPoolExecutor(len(load)) as threads:
        together = list(threads.map(answer, load))
    assert server.metric("vllm:num_preemptions_total") - preempted >= 5
    for (_, request), first, second in zip(load, alone, together, strict=True):
        usage = second["usage"]
        assert cached(second) <= usage["prompt_tokens"] == first["usage"]["prompt_tokens"]
        if request["vllm_xargs"] == NEVER:
            assert tokens_of(first) == tokens_of(second)
        if "response_format" in request:
            value = json.loads(text_of(second))
            assert list(value) == ["first", "second"]
            assert all(len(text) == 30 and text.islower() for text in value.values())


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


# Resets and pauses


def test_a_reset_while_a_request_runs(server):
    """One that fails drops no store; one that succeeds drops them all, in host memory too."""
    restored = lambda: server.metric("vllm_kvevict:restored_stores_total")  # noqa: E731
    prompt = random_prompt(DOCUMENT + 40, seed=12)
    expected = post(server, prompt, vllm_xargs=POINT)
    runs = body(random_prompt(60, seed=13), 200, vllm_xargs=NEVER)
    whole = server.post("/v1/completions", runs)
    for path, succeeds in (
        ("/reset_prefix_cache", False),
        ("/reset_prefix_cache?reset_running_requests=true", True),
    ):
        stream = events(server, "/v1/completions", runs)
        chunks = [next(stream)]
        assert switch(server, path) == dict(success=succeeds)
        assert server.metric("vllm:num_requests_running") == 1
        answer = post(server, prompt, vllm_xargs=POINT)
        assert cached(answer) == 0 if succeeds else cached(answer) >= DOCUMENT
        assert tokens_of(answer) == tokens_of(expected)
        chunks += stream
        ids = [t for chunk in chunks for t in chunk["choices"][0]["token_ids"] or []]
        assert ids == tokens_of(whole)
        # Host memory has kept the store, or has the one that was made since.
        turn_over(server)
        before = restored()
        assert cached(post(server, prompt, vllm_xargs=POINT)) == DOCUMENT
        assert restored() == before + 1
    wait_for(server, "vllm:num_requests_running", 0)
    assert switch(server, "/reset_prefix_cache") == dict(success=True)
    with evictions(server, 1):
        answer = post(server, prompt, vllm_xargs=POINT)
    assert cached(answer) == 0 and tokens_of(answer) == tokens_of(expected)
    assert restored() == before + 1


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_and_resume(server, mode):
    """Requests that were paused go on where they were, and those that came meanwhile begin."""
    prompts = [random_prompt(150 + n, seed=20 + n) for n in range(3)]
    alone = [tokens_of(one) for one in post_all(server, [body(p, 240) for p in prompts])]
    with evictions(server, 3), paused(server, prompts, f"mode={mode}&clear_cache=false") as clients:
        count = sum(len(client.lines) for client in clients)
        with ThreadPoolExecutor(1) as threads:
            late = threads.submit(post, server, prompts[0], 240)
            time.sleep(1)
            # A line and an empty one may have been under way to each client.
            assert mode != "keep" or sum(len(c.lines) for c in clients) <= count + 6
            assert not late.done()
            switch(server, "/resume")
            assert tokens_of(late.result(300)) == alone[0]
        for client, tokens in zip(clients, alone, strict=True):
            client.join(300)
            if mode == "abort":
                assert any(b'"finish_reason":"abort"' in line for line in client.lines)
            else:
                assert client.whole() and ids_of(client) == tokens
    wait_for(server, "vllm:kv_cache_usage_perc", 0)


def test_a_pause_that_clears_the_cache_computes_running_requests_again(server):
    """This is vLLM's default. The requests are evicted at their new length, as if preempted."""
    prompts = [random_prompt(150 + n, seed=50 + n) for n in range(3)]
    for asked, evicted in ((NEVER, 0), ({}, 3)):
        bodies = [body(prompt, 240, vllm_xargs=asked) for prompt in prompts]
        alone = [tokens_of(one) for one in post_all(server, bodies)]
        preempted = server.metric("vllm:num_preemptions_total")
        with evictions(server, evicted), paused(server, prompts, "mode=keep", asked) as clients:
            switch(server, "/resume")
            for client, tokens in zip(clients, alone, strict=True):
                client.join(300)
                found = ids_of(client)
                assert client.whole() and len(found) == 240
                # The client has these tokens: they were sampled before the pause.
                assert found[:SAMPLED] == tokens[:SAMPLED]
                assert found == tokens or evicted
        assert server.metric("vllm:num_preemptions_total") == preempted + 3
    wait_for(server, "vllm:kv_cache_usage_perc", 0)


SAMPLED = 70
"""Tokens that a stream has received when it is ready."""


@contextmanager
def paused(
    server: Server, prompts: list[list[int]], query: str, asked: dict[str, Any] | None = None
) -> Iterator[list[Stream]]:
    """Clients of long streams on a server that was paused while they ran."""
    clients = [Stream(server, prompt, 240, vllm_xargs=asked or {}) for prompt in prompts]
    assert all(client.ready.wait(300) for client in clients)
    switch(server, f"/pause?{query}")
    assert json.loads(status_of(server, "/is_paused")) == dict(is_paused=True)
    try:
        yield clients
    finally:
        switch(server, "/resume")


# Clients that leave


def test_clients_that_leave_in_a_prefill(server):
    """Those who wait for the store of one who left get it from somebody else; blocks return."""
    point = asks(at=900, interval=0)
    for number, after_s in enumerate((0.0, 0.03, 0.1)):
        document = random_prompt(900, seed=30 + number)
        questions = [document + random_prompt(20, seed=q) for q in range(3)]
        with ThreadPoolExecutor(3) as threads:
            left = threads.submit(leave, server, body(questions[0], vllm_xargs=point), after_s)
            time.sleep(0.01)
            asked = [
                threads.submit(post, server, question, 20, vllm_xargs=point)
                for question in questions[1:]
            ]
            left.result()
            found = [tokens_of(one.result(300)) for one in asked]
        wait_for(server, "vllm:num_requests_running", 0)
        wait_for(server, "vllm:num_requests_waiting", 0)
        wait_for(server, "vllm:kv_cache_usage_perc", 0)
        wait_for(server, "vllm_kvevict:blocks_saved", 0)
        with evictions(server, 2):
            for question, tokens in zip(questions[1:], found, strict=True):
                salt = str(question[-1])
                again = post(server, question, 20, vllm_xargs=point, cache_salt=salt)
                assert tokens_of(again) == tokens
    assert status(server, "/v1/completions", body([9], 1))[0] == 200


# Other interfaces


def test_responses_over_turns(server):
    """A turn that names the one before is the turn that carries the whole conversation."""
    common = dict(model="tiny", temperature=0, max_output_tokens=80)
    text, question = random_text(120, seed=40), random_text(15, seed=41)
    for asked in ({}, asks(at=120), asks(budget=64)):
        with evictions(server, 2):
            first = server.post("/v1/responses", common | dict(input=text, vllm_xargs=asked))
            named = dict(input=question, previous_response_id=first["id"])
            second = server.post("/v1/responses", common | named | dict(vllm_xargs=asked))
            carried = [
                dict(role="user", content=text),
                dict(role="assistant", content=spoken(first)),
                dict(role="user", content=question),
            ]
            whole = server.post("/v1/responses", common | dict(input=carried, vllm_xargs=asked))
        assert spoken(second) == spoken(whole) != spoken(first)
        for turn in (first, second, whole):
            usage = turn["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"]
        assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_run_batch(server, tiny_model, tmp_path):
    """Each line of a batch has its settings, and a bad one is refused alone."""
    cases = [{}, asks(at=100), asks(at={"message": 0}), asks(budget=64), NEVER, asks("nonsense")]
    turns = [*MESSAGES, dict(role="assistant", content="yes"), dict(role="user", content="who?")]
    requests = [chat_body(messages=turns, vllm_xargs=asked) for asked in cases]
    requests.append(chat_body(messages=turns, vllm_xargs=asks(budget=64), use_beam_search=True))
    file, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        dict(custom_id=str(n), method="POST", url="/v1/chat/completions", body=request)
        for n, request in enumerate(requests)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = forked.run(
        "vllm.entrypoints.cli.main", "run-batch", "-i", file, "-o", results,
        "--model", tiny_model, *ARGUMENTS, VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {one["custom_id"]: one for one in map(json.loads, results.read_text().splitlines())}
    answers = [found[line["custom_id"]]["response"] for line in lines]
    with evictions(server, 4):
        for request, answer in zip(requests[:5], answers, strict=False):
            assert answer["status_code"] == 200, answer["body"]
            expected = server.post("/v1/chat/completions", request)
            assert tokens_of(answer["body"]) == tokens_of(expected)
    refused = [found[line["custom_id"]] for line in lines[5:]]
    for line, reason in zip(refused, ("'nonsense'", "use_beam_search"), strict=True):
        assert line["response"]["status_code"] == 400
        assert reason in json.dumps(line), line
    assert len({tuple(tokens_of(answer["body"])) for answer in answers[:5]}) >= 4


def test_answers_after_all_of_this(server):
    """Complete answers to a crowd: the server lost nothing on the way."""
    prompts = [random_prompt(200 + n, seed=60 + n) for n in range(8)]
    with evictions(server, 24):
        alone = [tokens_of(post(server, prompt)) for prompt in prompts]
        together = post_all(server, [body(prompt) for prompt in prompts])
    assert list(map(tokens_of, together)) == alone

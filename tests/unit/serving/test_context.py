"""Messages and text as eviction points, with a template and a tokenizer made of words."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.config.requests import AT, AT_MESSAGE, AT_TEXT
from vllm_kvevict.serving.context import (
    _point_of_chat,
    _point_of_completion,
    _replacing,
    last_place,
)

WORDS: dict[str, int] = {}


def tokenize(text: str) -> list[int]:
    return [WORDS.setdefault(word, len(WORDS)) for word in text.split()]


class Asked(SimpleNamespace):
    def model_copy(self, update: dict[str, Any]) -> "Asked":
        return Asked(**vars(self) | update)


class Renderer:
    """Renders as vLLM does; ``alternate`` refuses chats whose last message is not the user's."""

    def __init__(self, alternate: bool = False, last_only: bool = False) -> None:
        self.alternate, self.last_only = alternate, last_only
        self.skipped: list[bool] = []
        """Whether each rendering left the cache of media alone."""

    def create_error_response(self, message: str, param: str | None = None) -> Any:
        return SimpleNamespace(error=SimpleNamespace(message=message, param=param))

    async def render_chat(self, request: Any, skip_mm_cache: bool = False) -> Any:
        self.skipped.append(skip_mm_cache)
        if self.alternate and request.messages[-1]["role"] != "user":
            raise RuntimeError("the last message must be the user's")
        shown = request.messages[-1:] if self.last_only else request.messages
        text = " ".join(f"<{m['role']}> {m['content']} <end>" for m in shown)
        text += " <assistant>" if request.add_generation_prompt else " <eos>"
        return [], [dict(prompt_token_ids=tokenize("<bos> " + text))]

    async def render_completion(self, request: Any, skip_mm_cache: bool = False) -> Any:
        self.skipped.append(skip_mm_cache)
        if not isinstance(request.prompt, str):
            return [dict(prompt_token_ids=[0, 1])] * 2
        return [dict(prompt_token_ids=tokenize("<bos> " + request.prompt))]


CHAT = [
    dict(role="system", content="a b c"),
    dict(role="user", content="d e i j k"),
    dict(role="assistant", content="f"),
    dict(role="user", content="g h"),
]


def chat(**xargs: Any) -> Asked:
    return Asked(
        messages=CHAT,
        add_generation_prompt=True,
        continue_final_message=False,
        truncate_prompt_tokens=None,
        use_beam_search=False,
        vllm_xargs=xargs,
    )


def completion(prompt: Any, **xargs: Any) -> Asked:
    return Asked(
        prompt=prompt,
        suffix=None,
        prompt_embeds=None,
        truncate_prompt_tokens=None,
        use_beam_search=False,
        vllm_xargs=xargs,
    )


def render_chat(request: Asked, renderer: Renderer | None = None) -> Any:
    render = _replacing(Renderer.render_chat, _point_of_chat, AT_MESSAGE)
    return asyncio.run(render(renderer or Renderer(), request))


def render_completion(request: Asked) -> Any:
    render = _replacing(Renderer.render_completion, _point_of_completion, AT_TEXT)
    return asyncio.run(render(Renderer(), request))


@pytest.mark.parametrize("named, point", [(0, 6), (-4, 6), (1, 13), (2, 16), (-2, 16), ("1", 13)])
def test_the_point_is_the_end_of_a_message(named, point):
    """<bos>, then role, words and <end> of each message; <eos> is not part of the whole."""
    request = chat(**{AT_MESSAGE: named, "kv_eviction_budget": "25%"})
    rendered = render_chat(request)
    assert request.vllm_xargs == {AT: point, "kv_eviction_budget": "25%"}
    assert rendered[1][0]["prompt_token_ids"][point - 1] == WORDS["<end>"]


@pytest.mark.parametrize("named", [3, -1, 4, -5, "first", 0.5])
def test_no_such_message(named):
    request = chat(**{AT_MESSAGE: named})
    error = render_chat(request).error
    assert error.param == "vllm_xargs" and AT_MESSAGE in error.message
    assert request.vllm_xargs == {AT_MESSAGE: named}


@pytest.mark.parametrize(
    "renderer, named, reason",
    [
        (Renderer(alternate=True), 2, "the last message must be the user's"),
        (Renderer(last_only=True), 1, "renders what comes before otherwise"),
    ],
)
def test_templates_that_cannot_end_there(renderer, named, reason):
    message = render_chat(chat(**{AT_MESSAGE: named}), renderer).error.message
    assert reason in message and f"give {AT} in tokens" in message


def test_a_template_that_refuses_other_ends_serves_those_it_renders():
    request = chat(**{AT_MESSAGE: 1})
    render_chat(request, Renderer(alternate=True))
    assert request.vllm_xargs == {AT: 13}


def test_a_text_ends_the_context_in_front_of_its_last_place():
    request = completion("x Q: y z Q: w", **{AT_TEXT: "Q:"})
    render_completion(request)
    assert request.vllm_xargs == {AT: 5}


@given(st.text("ab\u5b57", max_size=30), st.text("ab\u5b57", max_size=6))
def test_the_last_place_is_the_one_that_counting_finds(text, part):
    places = [i for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]
    assert last_place(text, part) == (places[-1] if places else -1)


def test_the_last_place_takes_time_in_proportion():
    """A repeated character, and one that differs in the middle: the worst that searches know."""

    def seconds(n: int) -> float:
        prompt, part = "c" * n, "c" + "b" + "c" * (n // 2)
        found = []
        for _ in range(5):
            begin = time.process_time()
            assert last_place(prompt, part) == -1
            found.append(time.process_time() - begin)
        return min(found)

    # Eight times the length: 8 in proportion, 64 where each place is compared anew.
    assert seconds(640_000) < 24 * max(seconds(80_000), 1e-4)


def test_a_token_that_runs_across_the_place_stays_behind_the_point():
    request = completion("x y zQ: w", **{AT_TEXT: "Q:"})
    render_completion(request)
    assert request.vllm_xargs == {AT: 3}


@pytest.mark.parametrize(
    "request_, reason",
    [
        (completion("x y", **{AT_TEXT: "Q"}), "stands nowhere in the prompt"),
        (completion("Q y", **{AT_TEXT: "Q"}), "stands at the start of the prompt"),
        (completion("x Q", **{AT_TEXT: ""}), "must be a text"),
        (completion("x Q", **{AT_TEXT: 3}), "must be a text"),
        (completion(["x Q", "y Q"], **{AT_TEXT: "Q"}), "one text"),
        (completion([1, 2], **{AT_TEXT: "Q"}), "one text"),
        (completion("x Q", **{AT_TEXT: "Q", AT: 2}), f"cannot be combined with {AT}"),
    ],
)
def test_refused_texts(request_, reason):
    before = dict(request_.vllm_xargs)
    error = render_completion(request_).error
    assert reason in error.message and error.param == "vllm_xargs"
    assert request_.vllm_xargs == before


def test_truncation_would_move_the_point():
    request = chat(**{AT_MESSAGE: 0})
    request.truncate_prompt_tokens = 5
    assert "truncate_prompt_tokens" in render_chat(request).error.message


def test_requests_without_the_keys_are_rendered_once():
    request = chat(kv_eviction_budget=64)
    render_chat(request, Renderer(alternate=True))
    assert request.vllm_xargs == {"kv_eviction_budget": 64}
    request.vllm_xargs = None
    render_chat(request)
    assert request.vllm_xargs is None


def test_media_are_looked_up_once():
    """vLLM's cache of media counts look-ups, and takes what was found for known to the engine."""
    renderer = Renderer()
    render_chat(chat(**{AT_MESSAGE: 1}), renderer)
    assert renderer.skipped == [False, True]


def test_a_beam_search_keeps_the_keys_that_it_is_refused_by():
    for request, render, key in (
        (chat(**{AT_MESSAGE: 1}), render_chat, AT_MESSAGE),
        (completion("a b c", **{AT_TEXT: "c"}), render_completion, AT_TEXT),
    ):
        request.use_beam_search = True
        render(request)
        assert list(request.vllm_xargs) == [key]

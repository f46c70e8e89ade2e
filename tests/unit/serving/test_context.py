"""Messages and text as eviction points, with a template and a tokenizer made of words."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.requests import AT, PROTECT
from vllm_kvevict.serving import context, system_prompt
from vllm_kvevict.serving.context import (
    _point_of_chat,
    _point_of_completion,
    _replacing,
    before_text,
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
        cache = SimpleNamespace(effective_attention_block_size=None, block_size=4)
        settings = SimpleNamespace(additional_config={}, cache_config=cache)
        self.renderer = SimpleNamespace(config=settings)
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
    render = _replacing(Renderer.render_chat, _point_of_chat)
    return asyncio.run(render(renderer or Renderer(), request))


def render_completion(request: Asked) -> Any:
    render = _replacing(Renderer.render_completion, _point_of_completion)
    return asyncio.run(render(Renderer(), request))


@pytest.mark.parametrize("named, point", [(0, 6), (-4, 6), (1, 13), (2, 16), (-2, 16), ("1", 13)])
def test_the_point_is_the_end_of_a_message(named, point):
    """<bos>, then role, words and <end> of each message; <eos> is not part of the whole."""
    request = chat(**{AT: {"message": named}, "kv_eviction_budget": "25%"})
    rendered = render_chat(request)
    assert request.vllm_xargs == {AT: point, "kv_eviction_budget": "25%"}
    assert rendered[1][0]["prompt_token_ids"][point - 1] == WORDS["<end>"]


@pytest.mark.parametrize("named", [3, -1, 4, -5, "first", 0.5])
def test_no_such_message(named):
    request = chat(**{AT: {"message": named}})
    error = render_chat(request).error
    assert error.param == "vllm_xargs" and f"{AT} message" in error.message
    assert request.vllm_xargs == {AT: {"message": named}}


@pytest.mark.parametrize(
    "renderer, named, reason",
    [
        (Renderer(alternate=True), 2, "the last message must be the user's"),
        (Renderer(last_only=True), 1, "renders what comes before otherwise"),
    ],
)
def test_templates_that_cannot_end_there(renderer, named, reason):
    message = render_chat(chat(**{AT: {"message": named}}), renderer).error.message
    assert reason in message and f"give {AT} in tokens" in message


def test_a_template_that_refuses_other_ends_serves_those_it_renders():
    request = chat(**{AT: {"message": 1}})
    render_chat(request, Renderer(alternate=True))
    assert request.vllm_xargs == {AT: 13}


def test_a_text_ends_the_context_in_front_of_its_last_place():
    request = completion("x Q: y z Q: w", **{AT: {"text": "Q:"}})
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
    request = completion("x y zQ: w", **{AT: {"text": "Q:"}})
    render_completion(request)
    assert request.vllm_xargs == {AT: 3}


@pytest.mark.parametrize(
    "request_, reason",
    [
        (completion("x y", **{AT: {"text": "Q"}}), "stands nowhere in the prompt"),
        (completion("Q y", **{AT: {"text": "Q"}}), "stands at the start of the prompt"),
        (completion("x Q", **{AT: {"text": ""}}), "must be a text"),
        (completion("x Q", **{AT: {"text": 3}}), "must be a text"),
        (completion(["x Q", "y Q"], **{AT: {"text": "Q"}}), "one text"),
        (completion([1, 2], **{AT: {"text": "Q"}}), "one text"),
        (completion("x Q", **{AT: {}}), 'must be prompt tokens or {"text": "..."} here'),
        (completion("x Q", **{AT: {"message": 0}}), 'or {"text": "..."} here, not'),
        (completion("x Q", **{AT: {"text": "Q", "message": 0}}), "must be prompt tokens or"),
    ],
)
def test_refused_texts(request_, reason):
    before = dict(request_.vllm_xargs)
    error = render_completion(request_).error
    assert reason in error.message and error.param == "vllm_xargs"
    assert request_.vllm_xargs == before


def test_truncation_would_move_the_point():
    request = chat(**{AT: {"message": 0}})
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
    render_chat(chat(**{AT: {"message": 1}}), renderer)
    assert renderer.skipped == [False, True]


def test_a_beam_search_keeps_the_keys_that_it_is_refused_by():
    for request, render in (
        (chat(**{AT: {"message": 1}}), render_chat),
        (completion("a b c", **{AT: {"text": "c"}}), render_completion),
    ):
        request.use_beam_search = True
        render(request)
        assert isinstance(request.vllm_xargs[AT], dict)


@pytest.mark.parametrize(
    "text, point",
    [("i j", 9), ("d e", 6), ("f", 13), ("h", 18), ("b c", 3), ("<end>", None), ("a b", None)],
)
def test_the_point_is_in_front_of_a_text_in_a_message(text, point):
    """<bos>, <role>, words: ``i`` is the tenth token, and ``d e`` begins the second message."""
    request = chat(**{AT: {"text": text}})
    rendered = render_chat(request)
    if point is None:
        where = "start of" if text == "a b" else "nowhere in"
        assert where in rendered.error.message and request.vllm_xargs == {AT: {"text": text}}
    else:
        assert request.vllm_xargs == {AT: point}


def test_parts_of_a_message_before_a_text():
    image = {"type": "image_url", "image_url": {"url": "u"}}
    text = {"type": "text", "text": "one two"}
    parts = [{"role": "user", "content": [text, image, {"type": "text", "text": "three two"}]}]
    assert before_text(parts, " two") == [
        {"role": "user", "content": [text, image, {"type": "text", "text": "three"}]}
    ]
    assert before_text(parts, "three") == [{"role": "user", "content": [text, image]}]
    assert before_text(parts, "ne") == [
        {"role": "user", "content": [{"type": "text", "text": "o"}]}
    ]
    assert before_text(
        [{"role": "user", "content": "a b"}, {"role": "x", "content": None}], "b"
    ) == [{"role": "user", "content": "a "}]
    with pytest.raises(ValueError, match="nowhere in the chat"):
        before_text(parts, "image")


def test_requests_take_mappings_and_vllms_own_values_only():
    from pydantic import ValidationError
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    context.install()
    given = {AT: {"text": "x"}, "kv_eviction_budget": "25%", "a": 1, "b": 0.5, "c": ["x", 1]}
    for kind, content in (
        (ChatCompletionRequest, dict(messages=[dict(role="user", content="a")])),
        (CompletionRequest, dict(prompt="a")),
    ):
        assert kind.model_validate(content | dict(vllm_xargs=given)).vllm_xargs == given
        with pytest.raises(ValidationError):
            kind.model_validate(content | dict(vllm_xargs={AT: {"text": {"deep": 1}}}))


class ToolRenderer(Renderer):
    """As :class:`Renderer`, with tools behind the system prompt, or in the first user message."""

    def __init__(self, config: Any, in_user: bool = False) -> None:
        super().__init__()
        self.renderer = SimpleNamespace(config=config)
        self.in_user = in_user

    async def render_chat(self, request: Any, skip_mm_cache: bool = False) -> Any:
        words, tools = ["<bos>"], " ".join(request.tools)
        for number, one in enumerate(request.messages):
            content = one["content"]
            own = one["role"] == "user" if self.in_user else one["role"] == "system"
            if own and tools:
                content = f"{tools} {content}" if self.in_user else f"{content} {tools}"
                tools = ""
            words.append(f"<{one['role']}> {content} <end>")
            assert number or one["role"] == "system" or not request.strict
        return [], [dict(prompt_token_ids=tokenize(" ".join(words)))]


def protected(
    monkeypatch: pytest.MonkeyPatch, messages: Any, in_user: bool = False, xargs: Any = None,
    tools: Any = ("t1", "t2"), **settings: Any,
) -> tuple[dict[str, Any], list[int]]:  # fmt: skip
    """What a server that protects system prompts makes of a chat; the chat's tokens."""
    config = EvictionConfig.parse(dict(policy="snapkv", protect_system=True) | settings)
    assert config is not None
    known = SimpleNamespace(config=config, rules=(config.rule(4),))
    monkeypatch.setattr(system_prompt, "server_rules", lambda found: found)
    request = Asked(
        messages=messages, tools=list(tools), add_generation_prompt=True, strict=False,
        continue_final_message=False, truncate_prompt_tokens=None, use_beam_search=False,
        vllm_xargs=xargs,
    )  # fmt: skip
    renderer = ToolRenderer(known, in_user)
    render = _replacing(ToolRenderer.render_chat, _point_of_chat)
    rendered = asyncio.run(render(renderer, request))
    return request.vllm_xargs or {}, rendered[1][0]["prompt_token_ids"]


SYSTEM = [dict(role="system", content="a b c"), dict(role="developer", content="k")]
REST = [dict(role="user", content="d e"), dict(role="assistant", content="f")]


def test_the_system_prompt_and_the_tools_are_protected(monkeypatch):
    """<bos> <system> a b c t1 t2 <end> <developer> k <end> <user>, and no word of the user's."""
    given, tokens = protected(monkeypatch, SYSTEM + REST)
    assert given == {PROTECT: 12} and tokens[11] == WORDS["<user>"] and tokens[12] == WORDS["d"]
    given, _ = protected(monkeypatch, SYSTEM + REST, in_user=True)
    assert given == {PROTECT: 12}, "the tools are in front of the user's words"
    assert protected(monkeypatch, REST, in_user=True)[0] == {PROTECT: 4}
    assert protected(monkeypatch, [dict(role="user", content="x y")], tools=())[0] == {PROTECT: 2}


def test_whose_settings_stay(monkeypatch):
    own = {PROTECT: 3}
    assert protected(monkeypatch, SYSTEM + REST, xargs=own)[0] == own
    assert protected(monkeypatch, SYSTEM + REST, protect_system=False)[0] == {}
    none = {"kv_eviction": "none"}
    assert protected(monkeypatch, SYSTEM + REST, xargs=none, allow="none")[0] == none


def test_a_point_and_protected_tokens(monkeypatch):
    given, _ = protected(monkeypatch, SYSTEM + REST, xargs={AT: {"message": 2}})
    assert given == {AT: 15, PROTECT: 12}


def test_a_cap_leaves_a_part_protected(monkeypatch):
    """A request is never refused for what its server protects."""
    long = [dict(role="system", content="s " * 400), *REST]
    given, tokens = protected(monkeypatch, long, tools=(), budget=128, max_budget=160)
    assert len(tokens) == 400 + 10 and given == {PROTECT: 101}
    assert protected(monkeypatch, long, tools=(), budget=128)[0] == {PROTECT: 404}

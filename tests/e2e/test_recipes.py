"""Each request of docs/recipes.md, sent to a server with the flags of its recipe: HTTP 200 at every
length, with and without a profile."""

import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server import Server
from tests.models import random_text
from tests.profiles import random_profile
from tests.snippets import ROOT, blocks

PAGE = ROOT / "docs" / "recipes.md"
LENGTHS = (300, 1000, 3000, 8000)
LONGEST = 9216
TOKENS_PER_SYLLABLE = 2.38
FLAGS = [
    "--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", "128M",
    "--block-size", "32", "--max-model-len", str(LONGEST), "--served-model-name", "tiny",
    "--hf-overrides", '{"max_position_embeddings": 16384}',
]  # fmt: skip


def recipes() -> dict[str, tuple[list[str], list[dict[str, Any]]]]:
    """Flags and request bodies of each recipe that shows requests, by its title."""
    found = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        shown = blocks(Section("\n" + text))  # type: ignore[arg-type]
        flags = [shlex.split(one)[3:] for one in shown if one.startswith("vllm serve")]
        bodies = [json.loads(one) for one in shown if one.startswith("{")]
        if bodies:
            (words,) = flags
            found[title] = words, bodies
    return found


class Section:
    """A part of a page, as ``blocks`` reads pages."""

    def __init__(self, text: str) -> None:
        self.text = text

    def read_text(self) -> str:
        return self.text


RECIPES = recipes()


def text_of(tokens: int, seed: int) -> str:
    """Text of about so many tokens of the model."""
    return random_text(round(tokens / TOKENS_PER_SYLLABLE), seed=seed)


def filled(body: Any, texts: dict[str, str]) -> Any:
    """A body with texts instead of the names in it."""
    if isinstance(body, str):
        for name, text in texts.items():
            body = body.replace(name, text)
        return body
    if isinstance(body, dict):
        return {key: filled(value, texts) for key, value in body.items()}
    return [filled(one, texts) for one in body] if isinstance(body, list) else body


def of_length(body: dict[str, Any], length: int) -> dict[str, Any]:
    """The body with texts of about ``length`` tokens in all; the document has what is left of them,
    and a chat without a document has a long question."""
    shown = json.dumps(body)
    if "DOCUMENT" not in shown:
        body = json.loads(shown.replace("QUESTION", "DOCUMENT QUESTION"))
    sizes = {"SYSTEM_PROMPT": 100, "QUESTION": 20}
    sizes["DOCUMENT"] = length - sum(size for name, size in sizes.items() if name in shown)
    texts = {name: text_of(size, seed) for seed, (name, size) in enumerate(sizes.items())}
    found: dict[str, Any] = filled(body, texts)
    return found


def test_recipes_show_requests() -> None:
    assert list(RECIPES) == ["Chat", "Questions about fixed documents (RAG)", "Agents with tools"]
    assert sum(len(bodies) for _, bodies in RECIPES.values()) == 5


@pytest.fixture(scope="module", params=["profile", "none"])
def profile(request: Any, tiny_model: Path, tmp_path_factory: Any) -> str:
    if request.param == "none":
        return "none"
    return str(random_profile(tmp_path_factory.mktemp("profile"), tiny_model)[0])


@pytest.fixture(scope="module", params=RECIPES)
def served(
    request: Any, tiny_model: Path, profile: str, tmp_path_factory: Any
) -> Iterator[tuple[Server, list[dict[str, Any]]]]:
    flags, bodies = RECIPES[request.param]
    words = [*FLAGS, *flags, "--kv-eviction-profile", profile]
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(tiny_model, words, log) as server:
        yield server, bodies


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("length", LENGTHS)
def test_each_request_is_answered(served: Any, length: int) -> None:
    """A request that is refused raises; the evictions are those of prompts above the budget."""
    server, bodies = served
    for body in bodies:
        before = server.evictions()["evictions"]
        asked = of_length(body, length) | dict(model="tiny", max_tokens=8, temperature=0)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = server.post(path, asked | dict(ignore_eos=True))
        prompt = answer["usage"]["prompt_tokens"]
        assert 0.6 * length < prompt < min(LONGEST, 1.6 * length)
        assert answer["usage"]["completion_tokens"] == 8
        whole = body["vllm_xargs"].get("kv_eviction") == "none"
        if length == max(LENGTHS):
            assert (server.evictions()["evictions"] > before) is not whole


TOOL_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Tool definitions follow the system prompt, in its message, as in most models' templates."""

TOOLS = [
    dict(
        type="function",
        function=dict(
            name=name,
            description=text_of(5, seed=len(name)),
            parameters=dict(type="object", properties={"town": dict(type="string")}),
        ),
    )
    for name in ("trains", "weather")
]


@pytest.fixture(scope="module")
def agents(tiny_model: Path, tmp_path_factory: Any) -> Iterator[Server]:
    """A server with the flags of the agents' recipe."""
    folder = tmp_path_factory.mktemp("agents")
    template = folder / "template.jinja"
    template.write_text(TOOL_TEMPLATE)
    words = [*FLAGS, *RECIPES["Agents with tools"][0], "--kv-eviction-profile", "none"]
    with Server(tiny_model, [*words, "--chat-template", str(template)], folder / "log") as server:
        yield server


def ask_agent(
    server: Server, chat: list[dict[str, str]], **settings: Any
) -> tuple[int, dict[str, int]]:
    """Prompt tokens of a chat with tools, and what it adds to the server's counters."""
    before = server.evictions()
    body = dict(
        model="tiny", messages=chat, tools=TOOLS, tool_choice="none",
        max_tokens=8, temperature=0, ignore_eos=True, vllm_xargs=settings,
        # No prefix is shared with another request, so an eviction frees what it leaves.
        cache_salt=f"{len(chat[1]['content'])} {settings}",
    )  # fmt: skip
    answer = server.post("/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 8
    after = server.evictions()
    return answer["usage"]["prompt_tokens"], {name: after[name] - before[name] for name in after}


def agents_chat(length: int) -> list[dict[str, str]]:
    """A system prompt and a question; about ``length`` tokens with the tools."""
    return [
        dict(role="system", content=text_of(30, seed=1)),
        dict(role="user", content=text_of(length - 240, seed=2)),
    ]


def system_part(model: Path, chat: list[dict[str, str]]) -> tuple[int, int]:
    """Tokens of a chat up to its user's first word, and all its tokens, by transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(
        chat, tools=TOOLS, chat_template=TOOL_TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids.index(tokenizer.convert_tokens_to_ids("<|user|>")) + 1, len(ids)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_system_prompt_and_the_tools_are_kept(
    agents: Server, tiny_model: Path, length: int
) -> None:
    """Their tokens are protected, and their blocks are kept in addition to the budget."""
    chat = agents_chat(length)
    system, whole = system_part(tiny_model, chat)
    assert 0.8 * length < whole < 1.25 * length and 100 < system < 300
    prompt, kept = ask_agent(agents, chat)
    assert prompt == whole
    _, lost = ask_agent(agents, chat, kv_eviction_protect_first=0)
    evicted = length > 2000
    assert (kept["evictions"], lost["evictions"]) == (evicted, evicted)
    assert (kept["tokens_protected"], lost["tokens_protected"]) == (system * evicted, 0)
    blocks = math.ceil(system / 32) * evicted
    assert kept["store_blocks_allocated"] - lost["store_blocks_allocated"] == blocks
    assert lost["tokens_evicted"] - kept["tokens_evicted"] == 32 * blocks

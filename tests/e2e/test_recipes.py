"""Each request of docs/recipes.md, sent to a server with the flags of its recipe: HTTP 200 at every
length, with and without a profile."""

import json
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


def filled(body: Any, length: int) -> Any:
    """A body with texts instead of the names in it, of about ``length`` tokens in all."""
    texts = {
        "SYSTEM_PROMPT": text_of(100, seed=1),
        "QUESTION": text_of(20, seed=2),
        "DOCUMENT": text_of(length - 150, seed=3),
    }
    if isinstance(body, str):
        for name, text in texts.items():
            body = body.replace(name, text)
        return body
    if isinstance(body, dict):
        return {key: filled(value, length) for key, value in body.items()}
    return [filled(one, length) for one in body] if isinstance(body, list) else body


def of_length(body: dict[str, Any], length: int) -> dict[str, Any]:
    """As :func:`filled`; a chat without a document has a long question."""
    text = json.dumps(body)
    if "DOCUMENT" not in text:
        body = json.loads(text.replace("QUESTION", "DOCUMENT QUESTION"))
    found: dict[str, Any] = filled(body, length)
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

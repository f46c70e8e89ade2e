"""A text that reads a context: tokenised by vLLM's own renderer, off the event loop, and capped."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.renderers import BaseRenderer

from tests.unit.front.test_admission import engine
from vllm_kvevict.front.admission import _wrap_process_inputs, check_request
from vllm_kvevict.front.preparation import tokenising
from vllm_kvevict.settings.requests import PREPARE

LONGEST = 1000
CHARS = 4
"""Of the longest token that the tokenizer below knows."""


class Tokenizer:
    """A token a character; notes in which thread it worked."""

    max_chars_per_token = CHARS
    truncation_side = "right"
    is_fast = False

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        self.threads.append(threading.current_thread())
        return [ord(one) % 100 for one in text][: kwargs.get("max_length")]

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return dict(input_ids=self.encode(text, **kwargs))


class Renderer(BaseRenderer):
    """vLLM's, with this tokenizer."""

    def render_messages(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


def renderer(tokenizer: Any) -> Renderer:
    model = SimpleNamespace(
        max_model_len=LONGEST, renderer_num_workers=1, supports_multimodal_inputs=False
    )
    parallel = SimpleNamespace(_api_process_rank=0)
    return Renderer(SimpleNamespace(model_config=model, parallel_config=parallel), tokenizer)


class Online:
    def __init__(self, tokenizer: Any, failed: bool = False) -> None:
        self.renderer, self.failed = renderer(tokenizer), failed

    def create_error_response(self, message: str, param: str) -> Any:
        return SimpleNamespace(error=SimpleNamespace(message=message, param=param))

    async def _render(self, request: Any) -> Any:
        return SimpleNamespace(error="vLLM's") if self.failed else ["rendered"]

    render = tokenising(_render)


def asked(text: Any) -> Any:
    return SimpleNamespace(vllm_xargs={PREPARE: text, "another": 1})


def test_a_text_becomes_its_tokens_off_the_event_loop():
    tokenizer, request = Tokenizer(), asked("abc")
    assert asyncio.run(Online(tokenizer).render(request)) == ["rendered"]
    assert request.vllm_xargs == {PREPARE: [97, 98, 99], "another": 1}
    (thread,) = tokenizer.threads
    assert thread is not threading.main_thread()


@pytest.mark.parametrize("text", [[3, 4], " ", 7])
def test_what_is_no_text_stays(text):
    tokenizer, request = Tokenizer(), asked(text)
    asyncio.run(Online(tokenizer).render(request))
    assert request.vllm_xargs == {PREPARE: text, "another": 1} and not tokenizer.threads
    request.vllm_xargs = None
    asyncio.run(Online(tokenizer).render(request))
    assert request.vllm_xargs is None


def test_a_text_longer_than_any_prompt_is_never_tokenised():
    tokenizer, request = Tokenizer(), asked("a" * (LONGEST * CHARS + 1))
    error = asyncio.run(Online(tokenizer).render(request)).error
    assert error.param == "vllm_xargs" and PREPARE in error.message
    assert "4001 characters" in error.message and not tokenizer.threads
    error = asyncio.run(Online(tokenizer).render(asked("a" * (LONGEST + 1)))).error
    assert PREPARE in error.message and "1001 input tokens" in error.message


def test_without_a_tokenizer_and_after_an_error():
    error = asyncio.run(Online(None).render(asked("abc"))).error
    assert "needs token ids on a server without tokenizer" in error.message
    request = asked("abc")
    assert asyncio.run(Online(Tokenizer(), failed=True).render(request)).error == "vLLM's"
    assert request.vllm_xargs[PREPARE] == "abc"


def process(text: Any, at: int = 10, length: int = 950, **request: Any) -> Any:
    """What ``LLM`` does: nobody has rendered the request before."""
    config = engine()
    config.cache_config.enable_prefix_caching = True
    params = SamplingParams(extra_args={"kv_eviction_at": at, PREPARE: text, "other": 1})
    made = dict(
        resumable=False, sampling_params=params, prompt_token_ids=[1] * length,
        prompt_embeds=None, mm_features=None,
    )  # fmt: skip
    given = SimpleNamespace(**made | request)
    processor = SimpleNamespace(vllm_config=config, renderer=renderer(Tokenizer()))
    _wrap_process_inputs(lambda self: given)(processor)
    return params.extra_args


def test_a_text_is_read_by_its_tokens():
    assert process("abc")[PREPARE] == [97, 98, 99] and process("abc")["other"] == 1
    assert process([3, 4])[PREPARE] == [3, 4]
    assert len(process("a" * 98, at=900)[PREPARE]) == 98
    for much in ("a" * 99, [3] * 99):
        with pytest.raises(ValueError, match=r"99 tokens long.* room for 1 to 98"):
            process(much, at=900)
    with pytest.raises(ValueError, match=r"KV eviction: kv_eviction_prepare: .* 4001 characters"):
        process("a" * 4001)
    with pytest.raises(ValueError, match="a prompt of text alone"):
        process("abc", mm_features=["an image"])


@pytest.mark.parametrize("token", [1000, 999_999, 2**40])
def test_tokens_out_of_the_vocabulary_are_refused_before_the_answer_begins(token):
    config = engine()
    config.cache_config.enable_prefix_caching = True
    params = SamplingParams(extra_args={"kv_eviction_at": 10, PREPARE: [5, token]})
    with pytest.raises(ValueError, match="kv_eviction_prepare must hold token ids from 0 to 999"):
        check_request(config, params, [1] * 100, None)


def test_pressure_is_refused_beside_drafts():
    config = engine()
    params = SamplingParams(extra_args={"kv_eviction_when": "pressure"})
    check_request(config, params, [1] * 100, None)
    config.speculative_config = SimpleNamespace(method="ngram")
    with pytest.raises(ValueError, match="kv_eviction_when pressure cannot be combined"):
        check_request(config, params, [1] * 100, None)

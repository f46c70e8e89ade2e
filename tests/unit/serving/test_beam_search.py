"""Beam search: vLLM's requests of one token are marked for the engine core, and no others."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from tests.unit.serving.test_admission import engine
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.core_options import read_options
from vllm_kvevict.config.requests import BEAM_SEARCH, RequestOptions, parse_options
from vllm_kvevict.serving import beam_search

INSIDE = dict(policy="snapkv", budget=64, interval=64, prefill_interval=64)


def request(tokens: int = 5) -> SimpleNamespace:
    return SimpleNamespace(prompt_token_ids=[1] * tokens, sampling_params=SamplingParams())


def marked(one: Any) -> bool:
    return (one.sampling_params.extra_args or {}).get(BEAM_SEARCH) is True


class Serving:
    """As vLLM's mixin: a step adds the requests of all beams in tasks of their own."""

    def __init__(self, vllm_config: Any) -> None:
        self.engine_client = SimpleNamespace(vllm_config=vllm_config)
        self.added: list[Any] = []

    async def _add(self, tokens: int) -> None:
        await asyncio.sleep(0)
        one = request(tokens)
        beam_search.mark(self.engine_client.vllm_config, one)
        self.added.append(one)

    async def beam_search(self, prompt: Any, request_id: str, params: Any, **more: Any) -> Any:
        for step in range(params.max_tokens):
            tasks = [asyncio.create_task(self._add(step + 5)) for _ in range(3)]
            await asyncio.gather(*tasks)
            yield step


def test_only_the_requests_of_a_search_are_marked() -> None:
    serving = Serving(engine(INSIDE))
    search = beam_search._wrap_online(Serving.beam_search)
    others: list[Any] = []

    async def run() -> None:
        prompt, params = {"prompt_token_ids": [1] * 5}, SimpleNamespace(max_tokens=4)
        steps = []
        async for step in search(serving, prompt, request_id="r", params=params):
            steps.append(step)
            # What the same task, or another one, adds between two steps is no part of it.
            others.append(request())
            beam_search.mark(serving.engine_client.vllm_config, others[-1])
        assert steps == [0, 1, 2, 3]

    asyncio.run(run())
    assert len(serving.added) == 12 and all(map(marked, serving.added))
    assert len(others) == 4 and not any(map(marked, others))


def test_a_search_in_python_ends_with_an_error_as_with_an_answer() -> None:
    def search(self: Any, fails: bool) -> Any:
        one = request()
        assert beam_search.mark(engine(), one) and marked(one)
        if fails:
            raise RuntimeError("no beam")
        return one

    wrapped = beam_search._wrap_offline(search)
    assert marked(wrapped(None, False))
    with pytest.raises(RuntimeError, match="no beam"):
        wrapped(None, True)
    assert not beam_search.mark(engine(), request())


def test_sequences_that_the_cache_need_not_hold_are_refused_before_an_answer_begins() -> None:
    """A budget of 64 and intervals of 64 hold ten blocks: start-up asked for no more."""
    search = beam_search._wrap_online(Serving.beam_search)

    def ask(prompt: int, answer: int, settings: Any = INSIDE) -> Any:
        given = {"prompt_token_ids": [1] * prompt}
        params = SimpleNamespace(max_tokens=answer)
        return search(Serving(engine(settings)), given, request_id="r", params=params)

    for prompt, answer in ((500, 1), (100, 400), (900, 100)):
        with pytest.raises(ValueError, match="KV eviction: beam search is never evicted"):
            ask(prompt, answer)
    ask(100, 30)
    ask(900, 100, "snapkv")


@pytest.mark.parametrize("key", ["kv_eviction", "kv_eviction_budget", "kv_eviction_nonsense"])
def test_settings_are_refused_by_name(key: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    beam_search.install_online()
    beam_search.install_online()
    common = dict(model="m", use_beam_search=True, n=2)
    chat = dict(messages=[dict(role="user", content="a")])
    for kind, body in ((ChatCompletionRequest, chat), (CompletionRequest, dict(prompt="a"))):
        asked = kind(**common, **body, vllm_xargs={key: 1, "other": 2})
        with pytest.raises(ValueError, match=rf"KV eviction: {key} cannot be combined"):
            asked.to_beam_search_params(4, {})
        for xargs in ({"other": 2}, None):
            plain = kind(**common, **body, vllm_xargs=xargs)
            assert plain.to_beam_search_params(4, {}).beam_width == 2
        assert not hasattr(kind.to_beam_search_params.__wrapped__, "__wrapped__")


def core_options(blocks: int = 100, prompt: int = 500, max_tokens: int = 1, **extra: Any) -> Any:
    config = EvictionConfig.parse(INSIDE)
    assert config is not None
    one = SimpleNamespace(
        request_id="r",
        num_prompt_tokens=prompt,
        max_tokens=max_tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens, extra_args=extra),
        mm_features=None,
        prompt_embeds=None,
    )
    return read_options(one, config, [config.rule(32)], False, 2000, blocks)


def test_the_engine_core_evicts_no_marked_request() -> None:
    """Clients of a front end without the plugin cannot keep a long answer whole with the mark."""
    assert not core_options(**{BEAM_SEARCH: True}).evicts
    assert core_options().evicts
    for trick in (dict(max_tokens=2), dict(blocks=15)):
        assert core_options(**trick, **{BEAM_SEARCH: True}) == RequestOptions("snapkv")
    config = EvictionConfig.parse(INSIDE)
    assert config is not None
    with pytest.raises(ValueError, match="unknown key 'kv_eviction_beam_search'"):
        parse_options(config, {BEAM_SEARCH: True}, 500, [config.rule(32)])

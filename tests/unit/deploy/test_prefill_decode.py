"""What the proxy of deploy/ sends to a prefill and to a decode server."""

import asyncio
import importlib.util
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from tests.http_stand_in import JsonHandler, served

PROXY = Path(__file__).parents[3] / "deploy" / "prefill_decode.py"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STOCK = {CHAT: ChatCompletionRequest, TEXT: CompletionRequest}
READ = dict(do_remote_prefill=True, remote_engine_id="p", remote_block_ids=[[1, 2]])
STORED = dict(do_remote_prefill=True, do_remote_decode=False)
RAG = dict(
    model="m",
    messages=[dict(role="user", content="a document"), dict(role="user", content="a question")],
    vllm_xargs=dict(kv_eviction_at=dict(message=0), kv_eviction_budget="25%"),
    logprobs=True,
    top_logprobs=2,
    stream=True,
)


def sent(path, body, *, stores=False, params=READ, stock=True):
    """Send a request through the proxy; returns the status and what each server got."""
    spec = importlib.util.spec_from_file_location("prefill_decode", PROXY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    got = dict(prefill=[], decode=[])

    class Handler(JsonHandler):
        def send_response(self, *args):
            super().send_response(*args)
            self.send_header("Content-Type", "application/json")

    class Prefill(Handler):
        def do_POST(self):
            got["prefill"].append(body := self.body())
            try:
                if stock:
                    STOCK[self.path].model_validate(body)
            except ValidationError as error:
                return self.reply(400, dict(error=dict(message=str(error))))
            return self.reply(200, dict(kv_transfer_params=params))

    class Decode(Handler):
        def do_POST(self):
            got["decode"].append(self.body())
            self.reply(200, {})

    async def ask(prefill, decode):
        app = module.application(module.Proxy(prefill, decode, stores))
        async with TestClient(TestServer(app)) as client:
            return (await client.post(path, json=body)).status

    with served(Prefill) as prefill, served(Decode) as decode:
        status = asyncio.run(ask(prefill, decode))
    return status, *got["prefill"], *got["decode"]


def test_stock_vllm_computes_the_prompt_of_the_rag_recipe():
    """The mapping goes to the decode server alone."""
    with pytest.raises(ValidationError, match="kv_eviction_at"):
        ChatCompletionRequest.model_validate(RAG)
    status, prefill, decode = sent(CHAT, RAG)
    assert status == 200
    assert decode == RAG | dict(kv_transfer_params=READ)
    asked = dict(do_remote_decode=True, do_remote_prefill=False)
    expected = dict(messages=RAG["messages"], model="m", max_tokens=1, stream=False)
    assert prefill == expected | dict(kv_transfer_params=asked)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_settings_of_others_go_to_both(path):
    body = (RAG if path == CHAT else dict(model="m", prompt="p")) | dict(
        vllm_xargs=dict(kv_eviction="none", other=3)
    )
    _, prefill, decode = sent(path, body)
    assert prefill["vllm_xargs"] == dict(other=3)
    assert decode["vllm_xargs"] == body["vllm_xargs"]


def test_a_server_that_writes_stores_gets_the_settings():
    """The store belongs to them."""
    _, prefill, decode = sent(CHAT, RAG, stores=True, params=STORED, stock=False)
    assert prefill["vllm_xargs"] == decode["vllm_xargs"] == RAG["vllm_xargs"]
    assert decode["kv_transfer_params"] == STORED


def test_a_store_of_other_settings_is_not_waited_for(caplog):
    _, _, decode = sent(CHAT, RAG, params=STORED)
    assert decode == RAG
    assert "start this proxy with --stores" in caplog.text


def test_a_refusal_of_the_prefill_server_goes_to_the_client():
    status, prefill = sent(CHAT, RAG | dict(vllm_xargs=dict(other=dict(a=1))))
    assert status == 400 and prefill["vllm_xargs"] == dict(other=dict(a=1))

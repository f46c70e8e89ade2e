"""What public clients of the OpenAI API see of a server that evicts."""

import json
from typing import Any

from benchmarks.server import Server
from tests.models import random_text

MESSAGES: list[dict[str, Any]] = [
    dict(role="system", content=random_text(20, seed=1)),
    dict(role="user", content=random_text(150, seed=2)),
]
GREEDY: dict[str, Any] = dict(temperature=0, max_tokens=70)
IDS: dict[str, Any] = dict(ignore_eos=True, return_token_ids=True)
SCHEMA = dict(
    type="object",
    properties=dict(city=dict(type="string", pattern="^[a-z]{40}$")),
    required=["city"],
    additionalProperties=False,
)
TOOL: dict[str, Any] = dict(
    type="function", function=dict(name="weather", description="Weather", parameters=SCHEMA)
)


def openai_client(server: Server, expected: list[int]) -> int:
    """The ``openai`` package: chat, stream, own settings, structured output, a tool.

    Args:
        server: Serves the model "tiny".
        expected: Token ids of the answer to :data:`MESSAGES`.

    Returns:
        How many requests were answered.

    """
    from openai import BadRequestError, OpenAI

    client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    chat = client.chat.completions
    asked: dict[str, Any] = dict(model="tiny", messages=MESSAGES, **GREEDY)
    answer = chat.create(**asked, extra_body=IDS)
    assert answer.choices[0].token_ids == expected  # type: ignore[attr-defined]
    assert answer.usage is not None and answer.usage.completion_tokens == GREEDY["max_tokens"]

    pieces, ids = [], []
    with chat.create(**asked, extra_body=IDS, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                ids += getattr(choice, "token_ids", None) or []
    assert ids == expected and "".join(pieces) == answer.choices[0].message.content

    less = chat.create(**asked, extra_body=IDS | dict(vllm_xargs=dict(kv_eviction_budget=64)))
    assert less.choices[0].token_ids != expected  # type: ignore[attr-defined]
    try:
        chat.create(**asked, extra_body=dict(vllm_xargs=dict(kv_eviction_budget=3)))
    except BadRequestError as error:
        assert "kv_eviction_budget" in str(error)
    else:
        raise AssertionError("a wrong setting passed")

    shaped = dict(type="json_schema", json_schema=dict(name="place", schema=SCHEMA))
    content = chat.create(**asked, response_format=shaped).choices[0].message.content
    assert len(json.loads(content or "")["city"]) == 40

    choice = dict(type="function", function=dict(name="weather"))
    called = chat.create(**asked, tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls
    assert called is not None and called[0].function.name == "weather"
    assert len(json.loads(called[0].function.arguments)["city"]) == 40
    return 5


def langchain_client(server: Server, expected: str) -> int:
    """LangChain's OpenAI client: a chat and its stream; returns how many requests were answered."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="tiny",
        base_url=server.url + "/v1",
        api_key="none",
        max_retries=0,
        extra_body=dict(ignore_eos=True),
        **GREEDY,
    )
    messages = [(message["role"], message["content"]) for message in MESSAGES]
    assert model.invoke(messages).content == expected
    assert "".join(str(piece.content) for piece in model.stream(messages)) == expected
    return 2

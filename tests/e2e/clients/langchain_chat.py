"""LangChain's OpenAI client, run by the interpreter of .venv-clients.

Arguments: the server's URL and a JSON file with ``messages`` (role and content), ``options`` of a
chat model, a JSON ``schema``, a ``tool`` in OpenAI's form, and what goes into ``extra_body``:
``plain`` and ``own``. Prints one JSON object.
"""

import json
import sys
from pathlib import Path

from langchain_openai import ChatOpenAI


def main(url: str, file: str) -> None:
    case = json.loads(Path(file).read_text())
    chat = ChatOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, **case["options"])
    messages = [(message["role"], message["content"]) for message in case["messages"]]
    answer = chat.invoke(messages, extra_body=case["plain"])
    pieces = [chunk.content for chunk in chat.stream(messages, extra_body=case["plain"])]
    shaped = chat.with_structured_output(case["schema"], method="json_schema").invoke(
        messages, max_tokens=300
    )
    called = chat.bind_tools([case["tool"]], tool_choice="weather").invoke(messages, max_tokens=300)
    own = chat.invoke(messages, extra_body=case["own"])
    print(
        json.dumps(
            dict(
                content=answer.content,
                tokens=answer.usage_metadata["output_tokens"],
                streamed="".join(pieces),
                shaped=shaped,
                called=called.tool_calls,
                own=own.content,
            )
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

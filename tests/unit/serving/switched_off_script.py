"""An API server's request classes before and after ``--kv-eviction none``, as JSON."""

import io
import json
import sys
from typing import Any

from fastapi import UploadFile
from pydantic import ValidationError

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.config.requests import KEYS
from vllm_kvevict.serving.plugin import register

MAPPING = {"message": 0}
ASKED: dict[str, Any] = {
    "ours": dict.fromkeys(KEYS, MAPPING),
    "both": {"kv_eviction_budget": "25%", "kv_eviction_at": MAPPING, "session_id": "s"},
    "empty": {},
    "another's": {"colour": MAPPING},
    "unknown": {f"{CONFIG_KEY}_colour": MAPPING},
    "unknown number": {f"{CONFIG_KEY}_colour": 3},
}


def kinds() -> dict[Any, dict[str, Any]]:
    """Every request class that has ``vllm_xargs``, with the other fields that it requires."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
    from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

    chat = [{"role": "user", "content": "hello"}]
    sound = {"file": UploadFile(io.BytesIO())}
    return {
        ChatCompletionRequest: {"messages": chat},
        CompletionRequest: {"prompt": "hello"},
        ResponsesRequest: {"input": "hello"},
        AnthropicMessagesRequest: {"model": "m", "messages": chat, "max_tokens": 1},
        TranscriptionRequest: sound,
        TranslationRequest: sound,
    }


def answers() -> dict[str, dict[str, Any]]:
    """What each class makes of each ``vllm_xargs``; "refused" for HTTP 400."""
    found: dict[str, dict[str, Any]] = {}
    for kind, fields in kinds().items():
        row = found[kind.__name__] = {}
        for name, asked in ASKED.items():
            # A copy: speech requests are sent as forms.
            try:
                row[name] = kind(**fields, vllm_xargs=dict(asked)).vllm_xargs
            except ValidationError:
                row[name] = "refused"
    return found


def main(model: str) -> None:
    import vllm.entrypoints.launchers.api_server.entry  # noqa: F401
    from vllm.engine.arg_utils import EngineArgs

    register()

    def build(**options: Any) -> Any:
        made = EngineArgs(model=model, skip_tokenizer_init=True, **options).create_engine_config()
        parallel, scheduler = made.parallel_config, made.scheduler_config
        return [made.compute_hash(), repr(parallel.worker_cls), repr(scheduler.scheduler_cls),
                made.additional_config]  # fmt: skip

    def off(value: Any, **more: Any) -> dict[str, Any]:
        return {"additional_config": {CONFIG_KEY: value} | more}

    other = {"other": 1}
    stock, stock_other, before = build(), build(additional_config=other), answers()
    settings = dict.fromkeys(EvictionConfig.model_fields, "wrong") | {"policy": "none"}
    rolled = [build(**off(value)) for value in ("none", "off", None, False, settings)]
    result = dict(
        before=before,
        after=answers(),
        stock=stock,
        rolled=rolled,
        stock_other=stock_other,
        rolled_other=build(**off("none", **other)),
    )
    print(f"\n{json.dumps(result)}")


if __name__ == "__main__":
    main(sys.argv[1])

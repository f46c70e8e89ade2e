"""Where a request's context ends, said in messages or text, turned into an eviction point.

A client of the API server knows its messages and its text; how many tokens they become, only the
server's chat template and tokenizer do.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any

from vllm_kvevict.config.requests import AT, AT_MESSAGE, AT_TEXT, message_index
from vllm_kvevict.config.sentences import shown

_WRAPPED = "_kv_eviction_wrapped"
CLOSING = 4
"""Most tokens with which a template may close a chat, beyond what it puts between messages."""

_Render = Callable[[Any, Any], Awaitable[Any]]


def install() -> None:
    """Let chats name a message and completions a text where their context ends. Idempotent."""
    from vllm.renderers.online_renderer import OnlineRenderer

    if hasattr(OnlineRenderer.render_chat, _WRAPPED):
        return
    OnlineRenderer.render_chat = _replacing(OnlineRenderer.render_chat, _point_of_chat, AT_MESSAGE)
    OnlineRenderer.render_completion = _replacing(
        OnlineRenderer.render_completion, _point_of_completion, AT_TEXT
    )


def _replacing(original: Callable[..., Any], find: Callable[..., Any], key: str) -> Any:
    """Wrap a method that renders requests, so that ``key`` becomes a point in tokens."""

    @wraps(original)
    async def render(self: Any, request: Any, **kwargs: Any) -> Any:
        rendered = await original(self, request, **kwargs)
        xargs = request.vllm_xargs or {}
        # A beam search is refused later, by the keys that its client gave.
        if key not in xargs or _failed(rendered) or request.use_beam_search:
            return rendered

        async def again(renderer: Any, part: Any) -> Any:
            # Only its tokens are looked at, and the cache of media counts every look-up.
            return await original(renderer, part, **{**kwargs, "skip_mm_cache": True})

        try:
            if AT in xargs or request.truncate_prompt_tokens is not None:
                other = AT if AT in xargs else "truncate_prompt_tokens"
                raise ValueError(f"KV eviction: {key} cannot be combined with {other}")
            point = await find(self, request, rendered, again)
        except ValueError as error:
            return self.create_error_response(str(error), param="vllm_xargs")
        left = {name: value for name, value in xargs.items() if name != key}
        request.vllm_xargs = left | {AT: point}
        return rendered

    setattr(render, _WRAPPED, True)
    return render


async def _point_of_chat(renderer: Any, request: Any, rendered: Any, render: _Render) -> int:
    """Tokens of a chat up to the end of the message that ``kv_eviction_at_message`` names.

    They are what the whole chat and the chat that ends there have in common.

    Raises:
        ValueError: There is no such message, or the template does not render a chat that ends
            there as the beginning of the whole, but for :data:`CLOSING` tokens.

    """
    index = message_index(request.vllm_xargs[AT_MESSAGE], len(request.messages))
    part = request.model_copy(
        update=dict(
            messages=request.messages[: index + 1],
            add_generation_prompt=False,
            continue_final_message=False,
        )
    )
    try:
        answer = await render(renderer, part)
    except Exception as error:
        # Templates raise whatever they like, vLLM its own errors.
        raise ValueError(_unfit(index, str(error))) from error
    if _failed(answer):
        raise ValueError(_unfit(index, answer.error.message))
    tokens = _tokens(answer[1])
    point = common_prefix(_tokens(rendered[1]), tokens)
    if not point or point < len(tokens) - CLOSING:
        raise ValueError(_unfit(index, "it then renders what comes before otherwise"))
    return point


def _unfit(index: int, reason: str) -> str:
    return (
        f"KV eviction: {AT_MESSAGE}: this model's chat template cannot end a chat with message "
        f"{index} ({reason}); name another message, or give {AT} in tokens"
    )


async def _point_of_completion(renderer: Any, request: Any, rendered: Any, render: _Render) -> int:
    """Tokens of a prompt in front of the last place of the text in ``kv_eviction_at_text``.

    Raises:
        ValueError: The prompt is not one text, or nothing stands in front of such a place.

    """
    text, prompt = request.vllm_xargs[AT_TEXT], request.prompt
    if not isinstance(text, str) or not text:
        raise ValueError(f"KV eviction: {AT_TEXT} must be a text, not {shown(text)}")
    if not isinstance(prompt, str) or request.suffix is not None or request.prompt_embeds:
        raise ValueError(
            f"KV eviction: {AT_TEXT} needs a prompt that is one text; give {AT} in tokens"
        )
    place = last_place(prompt, text)
    if place < 1:
        where = "at the start of" if place == 0 else "nowhere in"
        raise ValueError(f"KV eviction: {AT_TEXT} {shown(text)} stands {where} the prompt")
    part = await render(renderer, request.model_copy(update=dict(prompt=prompt[:place])))
    if _failed(part):
        raise ValueError(part.error.message)
    point = common_prefix(_tokens(rendered), _tokens(part))
    if not point:
        raise ValueError(f"KV eviction: no token lies in front of {AT_TEXT} {shown(text)}")
    return point


def _failed(rendered: Any) -> bool:
    """Return True if vLLM answers with an ``ErrorResponse`` instead of inputs."""
    return hasattr(rendered, "error")


def _tokens(engine_inputs: Sequence[Any]) -> Sequence[int]:
    (only,) = engine_inputs
    tokens = only.get("prompt_token_ids")
    if tokens is None:
        raise ValueError(f"KV eviction: a prompt of embeddings takes {AT} in tokens")
    return list(tokens)


def last_place(text: str, part: str) -> int:
    """Where ``part`` begins for the last time in ``text``; -1 for nowhere.

    Takes time in proportion to ``text`` for any two strings. ``str.rfind`` does not: CPython's
    search is linear forwards alone.
    """
    found = text[::-1].find(part[::-1])
    return found if found < 0 else len(text) - found - len(part)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two token sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))

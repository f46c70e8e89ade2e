"""Turns the message or the text at which a request's context ends into an eviction point.

A client of the API server knows its messages and its text; how many tokens they become, only the
server's chat template and tokenizer do.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from vllm_kvevict.config.requests import AT, MESSAGE, PROTECT, TEXT, message_index
from vllm_kvevict.config.sentences import shown
from vllm_kvevict.serving import system_prompt

_WRAPPED = "_kv_eviction_wrapped"
CLOSING = 4
"""Most tokens with which a template may close a chat, beyond what it puts between messages."""

Value = str | int | float | list[str | int | float] | dict[str, str | int | float]
"""Value of a key of ``vllm_xargs``: those of vLLM, and mappings."""

_Render = Callable[[Any, Any], Awaitable[Any]]


def install() -> None:
    """Let requests name a message or a text at which their context ends. Idempotent."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.renderers.online_renderer import OnlineRenderer

    if hasattr(OnlineRenderer.render_chat, _WRAPPED):
        return
    for request in (ChatCompletionRequest, CompletionRequest, ResponsesRequest):
        _allow_mappings(request)
    OnlineRenderer.render_chat = _replacing(OnlineRenderer.render_chat, _point_of_chat)
    OnlineRenderer.render_completion = _replacing(
        OnlineRenderer.render_completion, _point_of_completion
    )


def _allow_mappings(request: Any) -> None:
    """Let ``vllm_xargs`` of a request contain mappings in addition to numbers, texts and lists.

    The routes of an API server are built from these classes after its engine is configured.
    """
    request.model_fields["vllm_xargs"].annotation = dict[str, Value] | None
    request.model_rebuild(force=True)


def _replacing(original: Callable[..., Any], find: Callable[..., Any]) -> Any:
    """Wrap a method that renders requests, so that a mapping in ``kv_eviction_at`` becomes a point
    in tokens."""

    @wraps(original)
    async def render(self: Any, request: Any, **kwargs: Any) -> Any:
        rendered = await original(self, request, **kwargs)

        async def again(renderer: Any, part: Any) -> Any:
            # Only its tokens are looked at, and the cache of media counts every look-up.
            return await original(renderer, part, **{**kwargs, "skip_mm_cache": True})

        if _failed(rendered):
            return rendered
        if find is _point_of_chat:
            await _protect_system(self, request, rendered, again)
        xargs = request.vllm_xargs or {}
        # A beam search is refused later, by the keys that its client gave.
        if not isinstance(xargs.get(AT), Mapping) or request.use_beam_search:
            return rendered
        try:
            if request.truncate_prompt_tokens is not None:
                raise ValueError(
                    f"KV eviction: {AT} as a mapping cannot be combined with truncate_prompt_tokens"
                )
            point = await find(self, request, rendered, again)
        except ValueError as error:
            return self.create_error_response(str(error), param="vllm_xargs")
        request.vllm_xargs = {**xargs, AT: point}
        return rendered

    setattr(render, _WRAPPED, True)
    return render


async def _protect_system(renderer: Any, request: Any, rendered: Any, render: _Render) -> None:
    """Set the number of protected tokens of a chat, if the server protects system prompts."""
    known = system_prompt.wanted(renderer, request)
    if known is None:
        return

    async def tokens(part: Any) -> Sequence[int]:
        answer = await render(renderer, part)
        if _failed(answer):
            raise ValueError(answer.error.message)
        return _tokens(answer[1])

    try:
        whole = _tokens(rendered[1])
    except ValueError:
        return
    # The point is not in tokens yet, and protected tokens do not depend on it.
    part = request.model_copy(
        update=dict(
            vllm_xargs={
                key: value
                for key, value in (request.vllm_xargs or {}).items()
                if not (key == AT and isinstance(value, Mapping))
            }
        )
    )
    if count := await system_prompt.protected_tokens(known, part, whole, tokens):
        request.vllm_xargs = {**(request.vllm_xargs or {}), PROTECT: count}


def _place(request: Any, *kinds: str) -> tuple[str, Any]:
    """Return the kind of the place that ``kv_eviction_at`` names, and its value.

    Raises:
        ValueError: The mapping does not have one of these kinds as its only key, or a text is
            empty.

    """
    place = request.vllm_xargs[AT]
    if len(place) != 1 or next(iter(place)) not in kinds:
        forms = {MESSAGE: f'{{"{MESSAGE}": 0}}', TEXT: f'{{"{TEXT}": "..."}}'}
        valid = " or ".join(["prompt tokens", *(forms[kind] for kind in kinds)])
        raise ValueError(f"KV eviction: {AT} must be {valid} here, not {shown(dict(place))}")
    ((kind, value),) = place.items()
    if kind == TEXT and (not isinstance(value, str) or not value):
        raise ValueError(f"KV eviction: {AT} {TEXT} must be a text, not {shown(value)}")
    return kind, value


async def _point_of_chat(renderer: Any, request: Any, rendered: Any, render: _Render) -> int:
    """Return the tokens of a chat up to the place that ``kv_eviction_at`` names.

    They are what the whole chat and the chat that ends there have in common.

    Raises:
        ValueError: There is no such place, or the template does not render a chat that ends there
            as the beginning of the whole, but for :data:`CLOSING` tokens.

    """
    kind, value = _place(request, MESSAGE, TEXT)
    if kind == MESSAGE:
        messages = request.messages[: message_index(value, len(request.messages)) + 1]
    else:
        messages = before_text(request.messages, value)
    last = len(messages) - 1
    part = request.model_copy(
        update=dict(messages=messages, add_generation_prompt=False, continue_final_message=False)
    )
    try:
        answer = await render(renderer, part)
    except Exception as error:
        # Templates raise whatever they like, vLLM its own errors.
        raise ValueError(_unfit(kind, last, str(error))) from error
    if _failed(answer):
        raise ValueError(_unfit(kind, last, answer.error.message))
    tokens = _tokens(answer[1])
    point = common_prefix(_tokens(rendered[1]), tokens)
    if not point or point < len(tokens) - CLOSING:
        raise ValueError(_unfit(kind, last, "it then renders what comes before otherwise"))
    return point


def before_text(messages: Sequence[Any], text: str) -> list[Any]:
    """Return a chat up to the last occurrence of a text in its messages.

    Args:
        messages: Messages with contents as texts, or as lists of parts.
        text: The text, which one part contains whole.

    Raises:
        ValueError: No message contains it, or nothing is in front of it.

    """
    for index in reversed(range(len(messages))):
        message = dict(messages[index])
        content = message.get("content")
        parts: list[Any] = [content] if isinstance(content, str) else list(content or ())
        for number in reversed(range(len(parts))):
            part = parts[number]
            whole: Any = part if isinstance(part, str) else dict(part).get("text")
            place = last_place(whole, text) if isinstance(whole, str) else -1
            if place < 0:
                continue
            left = parts[:number]
            if place:
                left.append(
                    whole[:place] if isinstance(part, str) else {**part, "text": whole[:place]}
                )
            before = list(messages[:index])
            if left:
                before.append({**message, "content": left[0] if content is whole else left})
            if before:
                return before
            raise ValueError(
                f"KV eviction: {AT} {TEXT} {shown(text)} stands at the start of the chat"
            )
    raise ValueError(f"KV eviction: {AT} {TEXT} {shown(text)} stands nowhere in the chat")


def _unfit(kind: str, index: int, reason: str) -> str:
    return (
        f"KV eviction: {AT} {kind}: this model's chat template cannot end a chat "
        f"{'with' if kind == MESSAGE else 'in'} message {index} ({reason}); name another place, or "
        f"give {AT} in tokens"
    )


async def _point_of_completion(renderer: Any, request: Any, rendered: Any, render: _Render) -> int:
    """Return the tokens of a prompt in front of the last occurrence of a text.

    Raises:
        ValueError: The prompt is not one text, or nothing stands in front of such a place.

    """
    _, text = _place(request, TEXT)
    prompt = request.prompt
    if not isinstance(prompt, str) or request.suffix is not None or request.prompt_embeds:
        raise ValueError(
            f"KV eviction: {AT} {TEXT} needs a prompt that is one text; give {AT} in tokens"
        )
    place = last_place(prompt, text)
    if place < 1:
        where = "at the start of" if place == 0 else "nowhere in"
        raise ValueError(f"KV eviction: {AT} {TEXT} {shown(text)} stands {where} the prompt")
    part = await render(renderer, request.model_copy(update=dict(prompt=prompt[:place])))
    if _failed(part):
        raise ValueError(part.error.message)
    point = common_prefix(_tokens(rendered), _tokens(part))
    if not point:
        raise ValueError(f"KV eviction: no token lies in front of {AT} {TEXT} {shown(text)}")
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

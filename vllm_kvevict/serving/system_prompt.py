"""Protects the system prompt and the tool definitions of chats
(``--kv-eviction-protect-system``)."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_kvevict.config.requests import POLICY, PROTECT, parse_options
from vllm_kvevict.serving.rules import ServerRules, server_rules

logger = init_logger("vllm.kv_eviction.protect")

ROLES = ("system", "developer")
"""Roles of messages that count as the system prompt, at the beginning of a chat."""

OTHERS = "x", "y"
"""Contents of a user's message that begins differently from the chat's own."""


def wanted(renderer: Any, request: Any) -> ServerRules | None:
    """Return the server's settings if the system prompt of a chat must be protected, else None.

    A request that sets its own protected tokens, that is truncated or that is a beam search keeps
    its settings.
    """
    known = server_rules(renderer.renderer.config)
    if known is None or not known.config.protect_system:
        return None
    own = PROTECT in (request.vllm_xargs or {})
    skipped = own or request.truncate_prompt_tokens is not None or request.use_beam_search
    return None if skipped else known


def without_rest(request: Any) -> Any:
    """Return a chat with the same system prompt and tools, and with another first message."""
    messages = list(request.messages)
    count = 0
    while count < len(messages) and dict(messages[count]).get("role") in ROLES:
        count += 1
    rest = messages[count:]
    text = _first_text(rest[0]) if rest else ""
    other = OTHERS[text.lstrip().startswith(OTHERS[0])]
    return request.model_copy(
        update=dict(
            messages=[*messages[:count], {"role": "user", "content": other}],
            continue_final_message=False,
            add_generation_prompt=True,
        )
    )


async def protected_tokens(
    known: ServerRules,
    request: Any,
    tokens: Sequence[int],
    render: Callable[[Any], Awaitable[Sequence[int]]],
) -> int:
    """Return the number of first tokens of a chat that its system prompt and its tools take.

    They are what the chat has in common with another chat that begins alike. If the cap on budgets
    does not allow as many, half of them are protected, or a quarter, and so on.

    Args:
        known: The server's settings.
        request: The chat.
        tokens: Token ids of the chat.
        render: Renders a chat to token ids.

    """
    try:
        other = await render(without_rest(request))
    except Exception as error:
        # Templates raise whatever they like. The request is served with fewer protected tokens.
        logger.warning_once(
            "KV eviction: the chat template does not render a system prompt alone, so "
            "--kv-eviction-protect-system protects nothing: %s",
            str(error),
        )
        return 0
    pairs = enumerate(zip(tokens, other, strict=False))
    count = next((at for at, (a, b) in pairs if a != b), min(len(tokens), len(other)))
    settings = dict(request.vllm_xargs or {})
    if settings.get(POLICY, known.config.policy) == "none":
        return 0
    while count:
        try:
            parse_options(known.config, settings | {PROTECT: count}, len(tokens), known.rules)
        except ValueError:
            try:
                parse_options(known.config, settings, len(tokens), known.rules)
            except ValueError:
                # The request is refused anyway, for what its client set.
                return 0
            count //= 2
        else:
            break
    return count


def _first_text(message: Any) -> str:
    content = dict(message).get("content")
    if isinstance(content, str):
        return content
    for part in content or ():
        if isinstance(text := dict(part).get("text"), str):
            return text
    return ""

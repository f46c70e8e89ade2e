"""Error messages of configurations: one sentence that names the flag."""

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.config.plugins import policy_names

MAX_SHOWN_CHARS = 100
"""Maximum number of characters of a value in a message."""


def flag(name: str) -> str:
    """Return the command-line flag of a field."""
    return "--kv-eviction" if name == "policy" else f"--kv-eviction-{name.replace('_', '-')}"


def shown(value: Any) -> str:
    """Return the ``repr`` of a value for a message, truncated after 100 characters."""
    try:
        text = repr(value)
    except ValueError:
        # Python cannot convert integers of more than some thousand digits.
        return "a number of thousands of digits"
    return (
        text
        if len(text) <= MAX_SHOWN_CHARS
        else f"{text[:MAX_SHOWN_CHARS]} and so on, {len(text)} characters"
    )


def one_sentence(error: ValidationError, fields: Iterable[str]) -> str:
    """Return one sentence with every error of ``error``; ``fields`` are the valid field names."""
    known = ", ".join(fields)
    parts = []
    for item in error.errors():
        where = str(item["loc"][0]) if item["loc"] else ""
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] in ("extra_forbidden", "invalid_key"):
            key = item["loc"][0] if item["type"] == "extra_forbidden" else item["input"]
            parts.append(f"unknown key {key!r} in {CONFIG_KEY!r} (known: {known})")
        elif item["type"] == "missing":
            parts.append(f"{flag(where)} is missing; choose from {', '.join(policy_names())}")
        elif item["loc"]:
            if len(item["loc"]) > 1:
                where, message = str(item["loc"][0]), f"{item['loc'][1]} {message}"
            given = "" if item["type"] == "value_error" else f", not {item['input']!r}"
            message = message.replace("Input should be", "must be")
            parts.append(f"{flag(where)}: {message}{given}")
        else:
            parts.append(message)
    return "KV eviction: " + "; ".join(parts)

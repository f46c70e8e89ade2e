"""Host memory and folder for stores outside the KV cache, as written by an operator."""

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator

from vllm_kvevict.config.sentences import shown

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MAX_SUFFIX = ",max="


def parse_size(value: Any) -> int:
    """Read bytes: ``4G``, ``512M`` or a number.

    Raises:
        ValueError: The value is none of these; the message does not name a flag.

    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"([0-9]{1,15})\s*([KMGT]?)(i?B)?", str(value).strip(), re.IGNORECASE)
    if match is None or isinstance(value, bool):
        raise ValueError(f"give bytes such as 4G, 512M or 0, not {shown(value)}")
    return int(match[1]) * UNITS[match[2].upper()]


def parse_folder(value: Any) -> tuple[str, int | None]:
    """Read a folder, and the maximum bytes of its files: ``/var/stores,max=100G``.

    Returns:
        The folder, and the maximum bytes; None for no limit.

    Raises:
        ValueError: The value is not a folder; the message does not name a flag.

    """
    folder, separator, max_bytes = (
        value.rpartition(MAX_SUFFIX) if isinstance(value, str) else ("", "", "")
    )
    if not separator:
        folder = value
    if not isinstance(folder, str) or not folder.strip() or "\0" in folder:
        raise ValueError(f"give a folder, such as /var/stores,max=100G, not {shown(value)}")
    return folder, parse_size(max_bytes) if separator else None


def _checked(parse: Callable[[Any], Any]) -> BeforeValidator:
    """Return a validator that checks a value and leaves it unchanged."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return BeforeValidator(check)


Size = Annotated[int | str, _checked(parse_size)]
Folder = Annotated[str, _checked(parse_folder)]

"""Where stores are kept outside the KV cache, as an operator writes it."""

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator

from vllm_kvevict.config.sentences import shown

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MOST = ",max="


def parse_size(value: Any) -> int:
    """Read bytes: ``4G``, ``512M`` or a number.

    Raises:
        ValueError: The value is none of these; the message names no flag.

    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = re.fullmatch(r"([0-9]{1,15})\s*([KMGT]?)(i?B)?", str(value).strip(), re.IGNORECASE)
    if found is None or isinstance(value, bool):
        raise ValueError(f"give bytes such as 4G, 512M or 0, not {shown(value)}")
    return int(found[1]) * UNITS[found[2].upper()]


def parse_folder(value: Any) -> tuple[str, int | None]:
    """Read a folder, and the bytes that its files may take: ``/var/stores,max=100G``.

    Returns:
        The folder; the bytes, None for as many as fit.

    Raises:
        ValueError: The value is no such thing; the message names no flag.

    """
    folder, given, most = value.rpartition(MOST) if isinstance(value, str) else ("", "", "")
    if not given:
        folder = value
    if not isinstance(folder, str) or not folder.strip() or "\0" in folder:
        raise ValueError(f"give a folder, such as /var/stores,max=100G, not {shown(value)}")
    return folder, parse_size(most) if given else None


def _checked(parse: Callable[[Any], Any]) -> BeforeValidator:
    """Leave a value as it was written, if it can be read."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return BeforeValidator(check)


Size = Annotated[int | str, _checked(parse_size)]
Folder = Annotated[str, _checked(parse_folder)]

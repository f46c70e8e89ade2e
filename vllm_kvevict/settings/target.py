"""How much an eviction may lose, as an operator or a request writes it."""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

from vllm_kvevict.settings.sentences import shown

RUNGS = ("6.25%", "12.5%", "25%", "50%")
"""Budgets that are tried, the smallest first."""


def parse_target(value: Any) -> float:
    """Read a target in nats, at least 0.

    Raises:
        ValueError: The value is no such number; the message names no flag.

    """
    try:
        target = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        target = -1.0
    if not 0 <= target < math.inf:
        raise ValueError(f"give nats such as 0.03, at least 0, not {shown(value)}")
    return target


Target = Annotated[
    float | None, BeforeValidator(lambda value: None if value is None else parse_target(value))
]

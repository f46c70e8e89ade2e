"""What settings were called before: one sentence each with today's spelling."""

import re
from typing import Any

from vllm_kvevict.settings.sentences import shown

NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")

MIN_BUDGET = "min_budget"

MOVED = (
    "floor pool_kernel pool sinks recent_share random_share seed radius cluster_samples "
    "value_share probe_window probe_recent beta groups low_mark high_mark"
).split()
"""Settings of their own that are options now."""

OLDER = (*MOVED, MIN_BUDGET, "layers")


def sentence(name: str, value: Any) -> str:
    """How a setting of :data:`OLDER` is written today."""
    older = f"--kv-eviction-{name.replace('_', '-')}"
    if name == MIN_BUDGET:
        return f"{older} is part of the budget now: --kv-eviction-budget 25%,min={shown(value)}"
    if name == "layers":
        return f"{older} is now called --kv-eviction-profile"
    # The flag gave text, also for numbers.
    number = isinstance(value, str) and NUMBER.fullmatch(value)
    written = value if number else shown(value).replace("'", '"')
    return f"{older} is an option now: --kv-eviction-options '{{\"{name}\": {written}}}'"


def check_older(settings: dict[str, Any]) -> dict[str, Any]:
    """Refuse settings by older names.

    Raises:
        ValueError: A sentence for each with today's spelling.

    """
    found = [sentence(name, settings[name]) for name in OLDER if name in settings]
    if found:
        raise ValueError("; ".join(found))
    return settings

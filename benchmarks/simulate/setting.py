"""What runs side by side: stock vLLM, and eviction with its settings."""

import json
from dataclasses import dataclass, field
from typing import Any

from vllm_kvevict.config.policy_options import PolicyOptions

STOCK = "stock"
OWN = ("rings", "watermark", "alone")


@dataclass(frozen=True)
class Setting:
    """One line of the table.

    Args:
        name: As it was given.
        eviction: ``additional_config["kv_eviction"]``; None for stock vLLM.
        rings: Ring slots in place of those that memory allows; None for those.
        watermark: vLLM's, share of the blocks that an admission leaves free.
        alone: Whether every request makes a store of its own.

    """

    name: str
    eviction: dict[str, Any] | None = field(default=None, hash=False)
    rings: int | None = None
    watermark: float = 0.0
    alone: bool = False

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Read ``stock`` or ``POLICY:BUDGET``, and behind it ``,key=value`` pairs.

        Keys are ``rings``, ``watermark``, ``alone``, ``min`` (of the budget), and the fields and
        options of the eviction's configuration.

        Raises:
            ValueError: It is none of these.

        """
        head, *pairs = text.split(",")
        given: dict[str, Any] = {}
        for pair in pairs:
            key, found, value = pair.partition("=")
            if not found:
                raise ValueError(f"give key=value behind the comma, not {pair!r}")
            try:
                given[key] = json.loads(value)
            except ValueError:
                given[key] = value
        own = {key: given.pop(key) for key in OWN if key in given}
        if head == STOCK:
            if given:
                raise ValueError(f"stock knows only {', '.join(OWN)}, not {', '.join(given)}")
            return cls(text, **own)
        options = {key: given.pop(key) for key in PolicyOptions.model_fields if key in given}
        if options:
            given["options"] = options
        if "min" in given:
            head += f",min={given.pop('min')}"
        policy, found, budget = head.partition(":")
        if not found:
            raise ValueError(f"give stock or POLICY:BUDGET, not {head!r}")
        return cls(text, {"policy": policy, "budget": budget, **given}, **own)

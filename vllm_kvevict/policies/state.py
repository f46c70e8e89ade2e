"""State that policies with weighted tokens keep for a request between its evictions."""

from collections.abc import Sequence
from typing import Any


class PolicyState:
    """State of a policy for every (request, layer), by state row.

    Rows are cleared when a request ends or is preempted.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}

    def clear(self, rows: Sequence[int]) -> None:
        """Drop the state of these rows."""
        for row in rows:
            self._rows.pop(row, None)

    def get(self, row: int, layer_name: str) -> Any | None:
        """Return the state that the last eviction of the row kept; None before the first."""
        return self._rows.get(row, {}).get(layer_name)

    def keep(self, row: int, layer_name: str, state: Any) -> None:
        """Keep the state of an eviction until the next one."""
        self._rows.setdefault(row, {})[layer_name] = state

    def __len__(self) -> int:
        return len(self._rows)

"""What policies that weigh their tokens remember of a request between its evictions."""

from collections.abc import Sequence
from typing import Any


class Memories:
    """A policy's memory of every (request, layer), by state row.

    A row that is cleared forgets: a preempted request starts anew.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}

    def clear(self, rows: Sequence[int]) -> None:
        """Forget these rows."""
        for row in rows:
            self._rows.pop(row, None)

    def of(self, row: int, layer_name: str) -> Any | None:
        """What the last eviction of this life of the request left, None before the first."""
        return self._rows.get(row, {}).get(layer_name)

    def keep(self, row: int, layer_name: str, memory: Any) -> None:
        """Enter what an eviction leaves."""
        self._rows.setdefault(row, {})[layer_name] = memory

    def __len__(self) -> int:
        return len(self._rows)

"""Eviction points inside a prompt: where chunks of prefill must end."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager

if TYPE_CHECKING:
    from vllm.v1.request import Request


class EvictionPoints:
    """Clips chunks of prefill at the eviction points of requests that have one.

    Args:
        ledger: Timelines of all admitted requests.
        managers: The block managers that evict, by KV-cache group.

    """

    def __init__(
        self, ledger: EvictionLedger, managers: Mapping[int, EvictableAttentionManager]
    ) -> None:
        self._ledger = ledger
        self._managers = managers
        self._requests: set[str] = set()

    def add(self, request_id: str) -> None:
        """Watch a request that has an eviction point."""
        self._requests.add(request_id)

    def any_alive(self, requests: "Mapping[str, Request]") -> bool:
        """Whether a watched request is among ``requests``; the others are forgotten."""
        if self._requests:
            self._requests &= requests.keys()
        return bool(self._requests)

    def clip(self, request_id: str, start: int, end: int) -> int:
        """Where a chunk of prefill over [start, end) ends."""
        if request_id not in self._requests:
            return end
        entry = self._ledger.entry(request_id)
        if entry is None or not entry.stops:
            return end
        # Blocks of an eviction are free once its step was processed; whoever cannot go on
        # without them would be preempted, and would come back here without end.
        if entry.in_prefill(end) and any(m.retiring(request_id) for m in self._managers.values()):
            return start
        point = entry.stop(start)
        return end if point is None else min(end, point)

"""Whose turn it is to record queries: prompts at once, decoding requests one after the other."""

from collections.abc import Iterator

from vllm_kvevict.engine.rings import RingSlots


class RingTurns:
    """Hands ring slots out where there are fewer than requests.

    A prompt needs its slot in the very step that ends it, or it stays whole; so it takes one from
    the decoding request that began last, where none is free. A decoding request can wait: it
    holds a few blocks more meanwhile. Those that wait are served in the order in which they
    came, so that everybody evicts, less often than the interval says.

    Args:
        slots: All slots.

    """

    def __init__(self, slots: RingSlots) -> None:
        self._slots = slots
        self._waiting: dict[str, None] = {}
        self._recording: dict[str, int] = {}
        """Slot of each decoding request that has one, by request id; the latest comes last."""

    @property
    def free(self) -> int:
        """Slots that are left when everybody who waits has one."""
        return max(0, self._slots.num_free - len(self._waiting))

    @property
    def open_to_prompts(self) -> bool:
        return bool(self._slots.num_free or self._recording)

    def take_for_prompt(self) -> tuple[int | None, str | None]:
        """A slot for a step of prefill, and the decoding request that loses it; None for none."""
        slot = self._slots.take()
        if slot is not None or not self._recording:
            return slot, None
        request_id, slot = self._recording.popitem()
        self._waiting = {request_id: None, **self._waiting}
        return slot, request_id

    def waits(self, request_id: str) -> bool:
        """Whether a decoding request is in the queue."""
        return request_id in self._waiting

    def wait(self, request_id: str) -> None:
        """Queue a decoding request."""
        self._waiting[request_id] = None

    def next(self) -> Iterator[tuple[str, int]]:
        """Decoding requests whose turn has come, with their slots."""
        while self._waiting and (slot := self._slots.take()) is not None:
            request_id = next(iter(self._waiting))
            del self._waiting[request_id]
            self._recording[request_id] = slot
            yield request_id, slot

    def keep(self, request_id: str, slot: int) -> None:
        """Let a request that decodes by now keep the slot of its prompt."""
        self._recording.setdefault(request_id, slot)

    def leave(self, request_id: str, slot: int | None) -> None:
        """Forget a request, and take its slot back; None for none."""
        self._waiting.pop(request_id, None)
        self._recording.pop(request_id, None)
        if slot is not None:
            self._slots.give_back(slot)

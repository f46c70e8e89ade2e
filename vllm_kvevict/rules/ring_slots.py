"""Slots of the observation rings, which record the queries of requests."""


class RingSlots:
    """A bounded pool of ring slots, numbered 0 .. count - 1.

    A ring holds the last w queries of one request for every layer. Only requests near an eviction
    hold a slot.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pop(self) -> int | None:
        """Return a free slot, or None if there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        assert 0 <= slot < self.count and slot not in self._free, f"ring slot {slot} is not held"
        self._free.append(slot)

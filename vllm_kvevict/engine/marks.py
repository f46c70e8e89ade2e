"""Marks of free blocks between which eviction under pressure runs."""

from dataclasses import dataclass


@dataclass
class Marks:
    """Begins below the low mark and ends at the high one, so that it does not flutter.

    Args:
        blocks: Blocks of the pool.
        low_share: Share of them at the low mark, beside the reserve.
        high_share: The same at the high mark.

    """

    blocks: int
    low_share: float
    high_share: float
    reserve: int = 0
    """Blocks that running requests take until an eviction that begins has given some back."""
    pressing: bool = False

    @property
    def low(self) -> int:
        return self.reserve + int(self.low_share * self.blocks)

    @property
    def high(self) -> int:
        return self.reserve + int(self.high_share * self.blocks)

    def missing(self, free: int) -> int:
        """Blocks that must come free to reach the high mark; 0 where nothing presses.

        Args:
            free: Free blocks, less those that are promised; below 0 where more are.

        """
        self.pressing = free < self.low or (self.pressing and free < self.high)
        return self.high - free if self.pressing else 0

"""Watermarks of free blocks for eviction under pressure."""

from dataclasses import dataclass


@dataclass
class Watermarks:
    """Eviction under pressure begins below the low watermark and ends at the high one (hysteresis).

    Args:
        blocks: Number of blocks of the pool.
        low_share: Share of the blocks at the low watermark, in addition to the reserve.
        high_share: The same at the high watermark.

    """

    blocks: int
    low_share: float
    high_share: float
    reserve: int = 0
    """Blocks that running requests take until an eviction that begins now has freed some."""
    pressing: bool = False

    @property
    def low(self) -> int:
        return self.reserve + int(self.low_share * self.blocks)

    @property
    def high(self) -> int:
        return self.reserve + int(self.high_share * self.blocks)

    def update(self, free: int) -> None:
        """Update with the number of free blocks less the promised ones, which may be negative."""
        self.pressing = free < self.low or (self.pressing and free < self.high)

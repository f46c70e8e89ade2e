"""Free blocks between which eviction under pressure runs."""

from dataclasses import dataclass


@dataclass
class Watermarks:
    """Eviction under pressure begins below the low one and ends at the high one: no flutter.

    Args:
        blocks: Blocks of the pool.
        low_share: Share of them at the low watermark, beside the reserve.
        high_share: The same at the high watermark.

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

    def update(self, free: int) -> None:
        """Note the free blocks, less those that are promised; below 0 where more are."""
        self.pressing = free < self.low or (self.pressing and free < self.high)

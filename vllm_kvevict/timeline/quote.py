"""What an eviction takes from the pool and gives back: counts of blocks, asked for in one way."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupQuote:
    """What one eviction of a request takes and gives in one KV-cache group, in blocks.

    Args:
        group_id: The group.
        store: S, the blocks that survivors fill.
        own: Blocks that it replaces and no other request holds. Survivors may go there.
        reserved: Fresh blocks that the request has already for it.

    """

    group_id: int
    store: int
    own: int
    reserved: int

    @property
    def gain(self) -> int:
        """Blocks given back, less those taken."""
        return self.own - self.store

    @property
    def fresh(self) -> int:
        """Blocks that the pool must have for it."""
        return max(0, self.store - self.own - self.reserved)


@dataclass(frozen=True)
class Quote:
    """What one eviction of a request takes and gives in all groups that evict together."""

    parts: tuple[GroupQuote, ...]

    @property
    def groups(self) -> list[int]:
        return [part.group_id for part in self.parts]

    @property
    def gain(self) -> int:
        return sum(part.gain for part in self.parts)

    @property
    def fresh(self) -> int:
        return sum(part.fresh for part in self.parts)

    @property
    def profitable(self) -> "Quote":
        """Without the groups that give back no more than they take."""
        return Quote(tuple(part for part in self.parts if part.gain > 0))

    @property
    def unprofitable(self) -> list[int]:
        return [part.group_id for part in self.parts if part.gain <= 0]

"""Blocks that an eviction takes from the pool and returns to it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupQuote:
    """Blocks that one eviction of a request takes and frees in one KV-cache group.

    Args:
        group_id: The group.
        store: S, the number of blocks that survivors fill.
        own: Number of replaced blocks that no other request holds. Survivors may be written to
            them.
        reserved: Number of fresh blocks that the request already has for the eviction.

    """

    group_id: int
    store: int
    own: int
    reserved: int

    @property
    def gain(self) -> int:
        """Blocks freed, less those taken."""
        return self.own - self.store

    @property
    def fresh(self) -> int:
        """Blocks that the pool must provide."""
        return max(0, self.store - self.own - self.reserved)


@dataclass(frozen=True)
class Quote:
    """Blocks that one eviction of a request takes and frees in all groups that evict together."""

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
        """The quote without the groups that free no more blocks than they take."""
        return Quote(tuple(part for part in self.parts if part.gain > 0))

    @property
    def unprofitable(self) -> list[int]:
        return [part.group_id for part in self.parts if part.gain <= 0]

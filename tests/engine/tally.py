"""What a run of the engine has seen."""

from dataclasses import dataclass, field


@dataclass
class Tally:
    """What a run has seen, so that a test can assert it saw something."""

    preemptions: int = 0
    hits: int = 0
    hit_tokens: int = 0
    published: int = 0
    orphans: int = 0
    at_point: int = 0
    """Evictions at a request's own eviction point, with prompt left to prefill."""
    inside: int = 0
    """Evictions inside a prefill that evicts in intervals."""
    mixed: int = 0
    """Evictions into blocks of the request and fresh ones."""
    at_a_loss: int = 0
    """Evictions that took more blocks than they gave back."""
    put_off: int = 0
    """Evictions that did not run because they would have."""
    taken: int = 0
    """Admissions that took the store of another request's eviction."""
    taken_behind: int = 0
    """Those that took blocks behind the store's point, too."""
    taken_in_use: int = 0
    """Those in which somebody else held it, too."""
    taken_again: int = 0
    """Those after a preemption."""
    taken_later: int = 0
    """Those of a store that was not its chain's first, by group."""
    switched_off: int = 0
    """Steps of requests that switched eviction off."""


@dataclass
class Life:
    """What the scheduler promised about one life of a request."""

    number: int
    postponed: bool = False
    took: bool = False
    """Whether it began with the store of another request."""
    due: dict[int, int | None] = field(default_factory=dict)
    """When each group would evict, after the last step that was scheduled."""
    put_off: dict[int, set[int]] = field(default_factory=dict)
    """Lengths at which each group's evictions would have been that were put off."""
    stores: dict[int, int] = field(default_factory=dict)
    """Blocks of each group's last store."""
    tails: dict[int, int] = field(default_factory=dict)
    """Tail start of each group's last eviction."""

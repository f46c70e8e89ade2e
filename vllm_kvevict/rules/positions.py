"""The evictions of requests whose positions depend on tokens alone: the same for all requests of
the same rules. Pure arithmetic on lengths.

A long prompt has hundreds of positions, and each of them takes the arithmetic of all groups of
layers. It is done once for all requests.
"""

from bisect import bisect_right
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import lru_cache

from vllm_kvevict.rules.progress import LONGEST, EvictionProgress
from vllm_kvevict.rules.rule import EvictionRule, blocks_for

MAX_RULES = 32
"""Number of sets of rules whose positions are remembered. Requests may choose rules of their
own."""


@dataclass(frozen=True)
class Position:
    """What requests keep from a position on.

    Args:
        point: The position, in tokens.
        stores: S of every group; 0 before the group's first eviction.
        tails: Tail start of every group.
        share: The largest share of the tokens that the budget of a group keeps.

    """

    point: int
    stores: tuple[tuple[int, int], ...]
    tails: tuple[tuple[int, int], ...]
    share: float


class GroupPositions:
    """The evictions of one group.

    Args:
        rule: Its rule, with ``every``.

    """

    def __init__(self, rule: EvictionRule) -> None:
        self.points: list[int] = []
        self._held: list[tuple[int, int]] = [(0, 0)]
        """Tail start and blocks of the store before the first eviction, and after each one."""
        self._peaks: list[int] = [0]
        """The most blocks that a request holds up to each eviction."""
        self._now = EvictionProgress(rule, 0, 0)

    @property
    def due(self) -> int | None:
        """The next position; None if the group never evicts again."""
        return self._now.next_eviction

    def evict(self) -> None:
        """Evict at the next position."""
        assert self.due is not None
        self._peaks.append(max(self._peaks[-1], self._blocks(self.due)))
        self.points.append(self.due)
        self._now.evict(self.due)
        self._held.append((self._now.tail_start, self._now.store_blocks))

    def due_after(self, point: int) -> int | None:
        """Return the first position after ``point``, up to which all are known."""
        count = bisect_right(self.points, point)
        return self.points[count] if count < len(self.points) else self.due

    def _blocks(self, n: int) -> int:
        """Return the blocks of a request of ``n`` tokens, for the last eviction so far."""
        tail_start, store = self._held[-1]
        size = self._now.rule.block_size
        return blocks_for(n, size) - tail_start // size + store

    def held(self, n: int) -> tuple[int, int]:
        """Return the tail start, and the blocks of the store, after the evictions up to ``n``."""
        return self._held[bisect_right(self.points, n)]

    def peak(self, n: int) -> int:
        """Return the most blocks that a prefill of ``n`` tokens holds at once."""
        count, size = bisect_right(self.points, n), self._now.rule.block_size
        tail_start, store = self._held[count]
        return max(self._peaks[count], blocks_for(n, size) - tail_start // size + store)


class FixedPositions:
    """All positions at which the groups of a request evict, computed as far as they were asked
    for.

    What is computed for one request is linear in the evictions of its own prompt and answer. A
    client that gives every request rules of its own makes each of them pay for itself, and no other
    one.

    Args:
        rules: The rule of each group, with ``every``.

    """

    def __init__(self, rules: Mapping[int, EvictionRule]) -> None:
        self._rules = dict(sorted(rules.items()))
        self._groups = {group: GroupPositions(rule) for group, rule in self._rules.items()}
        self._positions: list[Position] = []

    def up_to(self, n: int) -> list[Position]:
        """Return the positions up to ``n`` tokens, and maybe further ones, in order."""
        groups = self._groups.values()
        while (point := min((g.due for g in groups if g.due is not None), default=n + 1)) <= n:
            for one in groups:
                if one.due == point:
                    one.evict()
            held = {group: one.held(point) for group, one in self._groups.items()}
            self._positions.append(
                Position(
                    point,
                    tuple((group, store) for group, (_, store) in held.items()),
                    tuple((group, tail_start) for group, (tail_start, _) in held.items()),
                    max(rule.budget(point) / point for rule in self._rules.values()),
                )
            )
        return self._positions

    def sufficient_blocks(self, group: int, n: int) -> int:
        """Return the number of blocks that suffices for a prefill of ``n`` tokens in a group, if no
        block is shared and evictions run.

        Evictions then reuse the request's own blocks, and the next chunk of prefill waits for them.
        """
        self.up_to(n)
        return self._groups[group].peak(n)

    def progress_after(
        self, group: int, point: int, progress: EvictionProgress, prefill_end: int
    ) -> EvictionProgress:
        """Return the progress of a request in a group after the evictions up to a position.

        Args:
            group: The group.
            point: The position.
            progress: Progress of the request before its first eviction.
            prefill_end: Length of its prefill.

        """
        last = LONGEST if progress.max_length is None else progress.max_length
        self.up_to(point)
        of_group = self._groups[group]
        due = of_group.due_after(point)
        tail_start, store = of_group.held(point)
        after = copy(progress)
        first = of_group.points[0] if store else None
        after.resume(tail_start, store, first, due if due is not None and due + 1 < last else None)
        return after.replayed(prefill_end)


def fixed_positions(rules: Mapping[int, EvictionRule]) -> FixedPositions:
    """Return the positions of these rules, which all requests with them share."""
    return _fixed_positions(tuple(sorted(rules.items())))


@lru_cache(maxsize=MAX_RULES)
def _fixed_positions(rules: tuple[tuple[int, EvictionRule], ...]) -> FixedPositions:
    return FixedPositions(dict(rules))

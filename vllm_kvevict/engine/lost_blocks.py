"""Blocks that a connector could not load, and everything that was computed over them.

A failed synchronous load is reported with the output of its step. Until then its blocks look
loaded: other requests may hit them, an eviction may replace them or write survivors to them, and
the requests that held them may have gone. With async scheduling all of this also happens in the
step that is planned before the report. The search therefore covers the block tables of all
requests, all evictions in flight, and the requests that left while a load was in flight.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_kvevict.engine.blocks import EvictionCore

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class Trace:
    """The blocks of one request in all KV-cache groups, as they were before evictions in flight.

    Args:
        request_id: The request.
        positional: First token and id of each block.
        read: Blocks of the stores that the request read before its evictions in flight.
        filled: Blocks that these evictions fill.

    """

    request_id: str
    positional: list[tuple[int, int]] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    filled: set[int] = field(default_factory=set)

    def first_over(self, lost: "AbstractSet[int]", filled: "AbstractSet[int]") -> int | None:
        """Return the first token that was computed over a lost block, if any was.

        Args:
            lost: Blocks that were lost as blocks of tokens.
            filled: Blocks that evictions of others filled with wrong survivors. Only a store has
                them: a block of tokens that is one of them held its tokens before.

        """
        if not self.read.isdisjoint(lost) or not self.read.isdisjoint(filled):
            return 0
        return min((start for start, block in self.positional if block in lost), default=None)

    def computed_from(self, first: int) -> set[int]:
        """Return the positional blocks that hold token ``first`` or a later one."""
        return {block for start, block in self.positional if start >= first}


@dataclass
class Step:
    """A step that was scheduled and not processed, and the requests that left before the next."""

    output: "SchedulerOutput"
    gone: list[Trace] = field(default_factory=list)


class LoadsInFlight:
    """Finds what depends on synchronous loads until their steps are processed.

    Args:
        core: The engine core.

    """

    def __init__(self, core: EvictionCore) -> None:
        self._core = core
        self._steps: deque[Step] = deque()

    def __len__(self) -> int:
        """Return the number of steps that were scheduled and not processed."""
        return len(self._steps)

    def scheduled(self, output: "SchedulerOutput") -> None:
        """Record that a step was scheduled."""
        self._steps.append(Step(output))

    def processed(self, output: "SchedulerOutput") -> None:
        """Record that a step was processed, and all steps that were scheduled before it."""
        while self._steps and self._steps.popleft().output is not output:
            pass

    def leaves(self, request_id: str) -> None:
        """Record the blocks of a request before they are freed."""
        if any(step.output.has_sync_kv_loads for step in self._steps):
            self._steps[-1].gone.append(self._trace(request_id))

    def depending(self, lost: Iterable[int]) -> tuple[set[str], set[int]]:
        """Return the requests that computed over lost blocks, and the blocks that are wrong.

        Args:
            lost: Ids of blocks that were not loaded.

        """
        wrong = set(lost)
        managers = self._core.cache.coordinator.single_type_managers
        holders = {request_id for manager in managers for request_id in manager.req_to_blocks}
        traces = [self._trace(request_id) for request_id in holders]
        traces += [trace for step in self._steps for trace in step.gone]
        firsts: dict[int, int] = {}
        """First wrong token of each trace that has one."""
        known = None
        # A request may read what another one computed, so the search ends when nothing is added.
        while known != firsts:
            known = dict(firsts)
            for index, trace in enumerate(traces):
                filled = set[int]().union(*(traces[i].filled for i in firsts if i != index))
                first = trace.first_over(wrong, filled)
                if first is not None:
                    firsts[index] = first
                    wrong |= trace.computed_from(first)
        requests = {traces[index].request_id for index in firsts}
        return requests, wrong.union(*(traces[index].filled for index in firsts))

    def _trace(self, request_id: str) -> Trace:
        trace = Trace(request_id)
        state = self._core.table.states.get(request_id)
        for manager in self._core.cache.coordinator.single_type_managers:
            group, size = manager.kv_cache_group_id, manager.block_size
            table = manager.req_to_blocks.get(request_id, ())
            trace.positional += [
                (index * size, block.block_id)
                for index, block in enumerate(table)
                if not block.is_null
            ]
            holding = state.holdings.get(group) if state is not None else None
            if holding is None:
                continue
            evictions = [eviction for eviction, _ in holding.replaced_in_flight]
            store = [block.block_id for block in holding.store]
            trace.read.update(evictions[0].old_store if evictions else store)
            for eviction in evictions:
                first = eviction.old_tail_start
                trace.positional += [
                    (first + index * size, block) for index, block in enumerate(eviction.positional)
                ]
                trace.filled.update(eviction.store)
        return trace

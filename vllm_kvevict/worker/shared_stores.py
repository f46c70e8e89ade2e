"""Stores that requests share, on a worker: published, entered, saved to tiers and loaded."""

from collections.abc import Callable, Mapping, Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.rules.step_plan import (
    Eviction,
    GroupEviction,
    ReusedStore,
    StepPlan,
    StoreCopy,
)
from vllm_kvevict.stores.host import HostStores


class SharedStores:
    """Published stores on one rank.

    Args:
        states: Device state of every group that evicts, by group id.
        row_of: Returns the state row of a request of the step.

    """

    def __init__(self, states: Mapping[int, GroupState], row_of: Callable[[str], int]) -> None:
        self.tiers: HostStores | None = None
        """Stores outside the KV cache, None if no flag asks for them."""
        self._states = states
        self._row_of = row_of
        self._plan = StepPlan()
        self._reused: dict[str, list[ReusedStore]] = {}
        self._unscored: set[int] = set()
        """First blocks of stores that a policy did not choose, because it failed."""

    def begin_step(self, plan: StepPlan) -> None:
        """Save stores that the step may overwrite, and load those that it reads, before the forward
        pass."""
        self._plan, self._reused = plan, plan.reused
        if self.tiers is not None:
            if plan.weigh:
                self.tiers.weigh(plan.weigh)
            self._save((), plan.saves_first)
            self.tiers.load(plan.loads)

    def enter(self) -> None:
        """Enter the stores of requests that begin with this step.

        Model Runner V2 assigns their rows within the step, so this runs once the batch is known.
        """
        reused, self._reused = self._reused, {}
        for request_id, groups in reused.items():
            row = self._row_of(request_id)
            for group in groups:
                state = self._states[group.group_id]
                store = async_tensor_h2d(
                    group.store, device=state.head_indptr.device, dtype=torch.int64
                )
                state.take(row, group.store[0], group.tail_start, store)

    def clear(self) -> None:
        """Free host memory, for a server that sleeps."""
        if self.tiers is not None:
            self.tiers.clear()

    def chosen(self, group: GroupEviction, failed: bool) -> None:
        """Record whether a policy failed to choose the tokens of a store, which is then not what
        its key says, and is neither kept nor written."""
        if failed:
            self._unscored.add(group.store[0])
        else:
            self._unscored.discard(group.store[0])

    def _save(self, forgotten: Sequence[str], saves: Sequence[StoreCopy]) -> None:
        assert self.tiers is not None
        if self._unscored:
            for copy in saves:
                if any(set(part.store[:1]) & self._unscored for part in copy.groups):
                    copy.keep = copy.write = False
        self.tiers.save(forgotten, saves)

    def end_step(self, evictions: Sequence[Eviction]) -> None:
        """Keep the head splits of published stores after these evictions, and save stores."""
        for eviction in evictions:
            published = [group for group in eviction.groups if group.published]
            if published:
                row = self._row_of(eviction.request_id)
                for group in published:
                    self._states[group.group_id].keep(row, group.store[0])
        if self.tiers is not None:
            self._save(self._plan.forgotten, self._plan.saves)
            self._plan = StepPlan()

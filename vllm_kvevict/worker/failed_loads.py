"""Nothing that was computed over blocks that were not loaded is saved by LMCache.

LMCache knows which blocks it could not load before it saves what the step computed, and saves it
all the same. The scheduler ends the requests that read these blocks, but only when the step was
processed: until then LMCache would save their chunks in this step and in those that were planned
before the report, and answer later requests from them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvevict.rules.step_plan import STEPS_AHEAD
from vllm_kvevict.worker.ranks import union_of_ranks


class BlocksNotLoaded:
    """Blocks that loads of the steps in flight did not fill.

    They are forgotten with the first step that was planned after the report of their loss: the
    requests that read them have ended by then, and others may have got the blocks.
    """

    def __init__(self) -> None:
        self._steps: deque[set[int]] = deque()

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Follow the scheduler; called once for every step, in order."""
        ahead: int = getattr(scheduler_output, STEPS_AHEAD, 0)
        while len(self._steps) > ahead:
            self._steps.popleft()
        self._steps.append(set())

    def add(self, blocks: Iterable[int]) -> None:
        """Record blocks that a load of this step did not fill."""
        self._steps[-1].update(blocks)

    def __bool__(self) -> bool:
        return any(self._steps)

    def any_in(self, blocks: Iterable[int]) -> bool:
        """Return whether one of ``blocks`` was not filled.

        A hit of the prefix cache contains all blocks before it, so that the blocks of a request
        that has not evicted name all tokens that it was computed over.
        """
        return not set().union(*self._steps).isdisjoint(blocks)


class FailedLoads:
    """Keeps LMCache's worker from saving what was computed over blocks that it did not load.

    Args:
        connector: LMCache's connector of this worker; its methods are replaced on the instance.
        block_size: Tokens of a block.

    """

    def __init__(self, connector: KVConnectorBase_V1, block_size: int) -> None:
        self._connector, self._block_size = connector, block_size
        self._lost = BlocksNotLoaded()
        self._loads = False
        """Whether this step loads, and its ranks have not told each other what they lost."""
        self._failed: set[int] = set()
        self._reported: set[int] = set()
        start: Callable[..., Any] = connector.start_load_kv
        wait: Callable[[], Any] = connector.wait_for_save
        errors: Callable[[], set[int]] = connector.get_block_ids_with_load_errors

        def start_load_kv(forward_context: Any, **kwargs: Any) -> None:
            start(forward_context, **kwargs)
            # LMCache forgets what it reports.
            self._failed = errors()
            self._reported |= self._failed

        def wait_for_save() -> None:
            if self._loads:
                self._loads = False
                # What another rank could not load is in the hidden states of all.
                self._lost.add(union_of_ranks(self._failed))
            if self._lost:
                self._skip_saves()
            wait()

        def get_block_ids_with_load_errors() -> set[int]:
            reported, self._reported = self._reported, set()
            return reported

        connector.start_load_kv = start_load_kv
        connector.wait_for_save = wait_for_save
        connector.get_block_ids_with_load_errors = get_block_ids_with_load_errors

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Follow the scheduler before the forward pass."""
        self._lost.begin_step(scheduler_output)
        self._loads, self._failed = scheduler_output.has_sync_kv_loads, set()

    def _skip_saves(self) -> None:
        """Mark what must not be saved in this step as if it had been."""
        for request in self._connector._get_connector_metadata().requests:
            if request.save_spec is None:
                continue
            # One slot for each token from the first one on.
            blocks = request.slot_mapping[:: self._block_size] // self._block_size
            if self._lost.any_in(blocks.tolist()):
                request.save_spec.can_save = False
                # A producer saves whatever may be saved or not.
                request.save_spec.skip_leading_tokens = len(request.token_ids)

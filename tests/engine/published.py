"""Blocks that can be reached by hash hold what full attention computes for their prefix."""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import get_block_hash

from tests.engine.saving import extend_chain
from tests.engine.shadow import ShadowWorker, of_store
from tests.engine.tally import Tally
from tests.engine.views import owned

if TYPE_CHECKING:
    from benchmarks.bare_scheduler import Setup


class Published:
    """What the pool publishes, beside what the shadow worker's memory holds.

    ``scheduled`` and ``executed`` count steps: a block may be published a step before it is filled.
    """

    def __init__(self, setup: "Setup", scheduler: Any, worker: ShadowWorker, tally: Tally) -> None:
        self._setup, self._scheduler, self._worker, self._tally = setup, scheduler, worker, tally
        self._pool = scheduler.kv_cache_manager.block_pool
        self.scheduled = self.executed = 0
        self._published: dict[int, tuple[Any, int]] = {}
        self._chains: dict[str, list[int]] = {}
        self._truth: dict[Any, list[int]] = {}
        self._alive: dict[str, Any] = {}
        """Requests at the end of the last step."""

    def forget_what_no_step_computes(self, output: Any) -> None:
        """Work around vLLM, which has this flaw without eviction too.

        It publishes a request's blocks when it allocates them. Under the priority policy it may
        preempt that request later in the same call, and the step then never computes them.
        """
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        loaded = {request.request_id for request in self._scheduler.kv_holding_waiting}
        owners = {
            block
            for group in owned(managers)
            for request_id in loaded | output.num_scheduled_tokens.keys()
            for block in group.get(request_id, ())
        }
        orphans = {
            block.block_id
            for block in self._pool.blocks
            if block.block_hash is not None
            and not of_store(block.block_hash)
            and block.block_id not in owners
            and self._published.get(block.block_id, (None, 0))[0] != block.block_hash
        }
        if orphans:
            assert self._setup.priority and output.preempted_req_ids, f"{orphans} never computed"
            self._tally.orphans += len(orphans)
            self._pool.evict_blocks(orphans)

    def check(self) -> None:
        """Reachable by hash means: what full attention computes for that prefix."""
        # One that ended since may have published a block that its last tokens filled.
        for request in (self._alive | self._scheduler.requests).values():
            self._learn(request)
        self._alive = dict(self._scheduler.requests)
        for block in self._pool.blocks:
            if block.block_hash is None or of_store(block.block_hash):
                self._published.pop(block.block_id, None)
                continue
            known = self._published.get(block.block_id)
            if known is None or known[0] != block.block_hash:
                self._published[block.block_id] = known = (block.block_hash, self.scheduled)
                self._tally.published += 1
            if known[1] <= self.executed:
                expected = self._truth[get_block_hash(block.block_hash)]
                assert self._worker.memory[block.block_id] == expected, (
                    f"block {block.block_id} is published and holds something else"
                )

    def _learn(self, request: Any) -> None:
        chain = self._chains.setdefault(request.request_id, [])
        if len(chain) == request.num_tokens:
            return
        extend_chain(chain, request.all_token_ids[len(chain) :])
        bs = self._setup.block_size
        for index, block_hash in enumerate(request.block_hashes):
            self._truth[block_hash] = chain[index * bs : (index + 1) * bs]

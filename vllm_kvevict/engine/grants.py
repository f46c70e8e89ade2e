"""Steps of prefill that come with the blocks of their eviction, where evictions must run."""

from typing import Any

from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager


class StoreGrants:
    """Counts and allocates, in vLLM's admission of a request, what its first step's eviction takes.

    Only where requests evict whatever they share: else own blocks are always enough, and nothing
    here is built. A request that runs is granted nothing: vLLM would preempt others for it, where
    its eviction can wait for blocks.

    Args:
        manager: The block manager of one group, whose counting and allocating is extended.
        ledger: Timelines of all admitted requests.

    """

    def __init__(self, manager: EvictableAttentionManager, ledger: EvictionLedger) -> None:
        self._manager = manager
        self._ledger = ledger
        self._count = manager.get_num_blocks_to_allocate
        self._allocate = manager.allocate_new_blocks
        self._counted: tuple[str, int] = ("", 0)
        """Request that was counted last and waits, and the start of its step."""
        manager.get_num_blocks_to_allocate = self.get_num_blocks_to_allocate  # type: ignore[method-assign, assignment]
        manager.allocate_new_blocks = self.allocate_new_blocks

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        total_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Blocks the step needs: vLLM's own count, plus what its eviction takes for certain."""
        needed = self._count(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
        )
        if request_id in self._ledger.entries:
            return needed
        self._counted = request_id, total_computed_tokens
        hits = [b for b in new_computed_blocks if b.ref_cnt and not b.is_null]
        entry = self._ledger.entry(request_id)
        return needed + self._taken(request_id, entry, total_computed_tokens, num_tokens, len(hits))

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        """Allocate positional blocks up to ``num_tokens``, and what the step's eviction takes."""
        new_blocks = self._allocate(request_id, num_tokens, num_tokens_main_model)
        counted, start = self._counted
        if counted != request_id:
            return new_blocks
        self._counted = "", 0
        entry = self._ledger.admit(request_id)
        self._manager.grant(request_id, self._taken(request_id, entry, start, num_tokens))
        return new_blocks

    def _taken(
        self, request_id: str, entry: Entry | None, start: int, end: int, hits: int = 0
    ) -> int:
        """Fresh blocks that the eviction of a prefill's step over [start, end) takes for certain.

        ``hits`` are blocks of others that the request is about to share.
        """
        if entry is None:
            return 0
        timeline = entry.timelines.get(self._manager.kv_cache_group_id)
        evicts = (
            timeline is not None
            and end <= timeline.prefill_end
            and timeline.is_due(end)
            and not self._ledger.last_step(request_id, end)
            and self._ledger.window_ready(entry, start, end)
        )
        return self._manager.missing(request_id, entry, end, hits) if evicts else 0

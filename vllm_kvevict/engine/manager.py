"""The block manager of a KV-cache group that evicts: positional blocks plus a store."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_kvevict.engine.ledger import Entry, EvictionLedger
from vllm_kvevict.engine.spec import EvictableAttentionSpec
from vllm_kvevict.schedule.step_plan import GroupEviction
from vllm_kvevict.schedule.timeline import blocks_for


@dataclass
class Holding:
    """Blocks of one request beside its positional ones.

    ``granted`` is a store in waiting: counted and owned, not yet part of a plan. ``retiring``
    pairs each eviction in flight with the store it replaces. ``saved`` are the positional blocks
    given back, less the blocks held beside those that are left.
    """

    store: list[KVCacheBlock] = field(default_factory=list)
    granted: list[KVCacheBlock] = field(default_factory=list)
    retiring: list[tuple[GroupEviction, list[KVCacheBlock]]] = field(default_factory=list)
    saved: int = 0

    def take_retiring(self, eviction: GroupEviction) -> list[KVCacheBlock] | None:
        """The store that an eviction of this request replaced; None if it is not one of them."""
        for index, (retiring, store) in enumerate(self.retiring):
            if retiring is eviction:
                del self.retiring[index]
                return store
        return None

    @property
    def blocks(self) -> list[KVCacheBlock]:
        old = [block for _, store in self.retiring for block in store]
        return old + self.store + self.granted


class EvictableAttentionManager(FullAttentionManager):
    """Full attention whose old positional blocks give way to a store of S blocks.

    The block table stays positional: a freed block leaves a null block behind, so vLLM's slot
    mapping and its prefix caching need no change. The scheduler binds a ledger before the
    first request; without one (vLLM builds managers for its own sizing too) this is vLLM's
    full-attention manager.
    """

    ledger: EvictionLedger | None = None

    def __init__(self, kv_cache_spec: EvictableAttentionSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.timeline = kv_cache_spec.timeline
        self.holdings: dict[str, Holding] = {}
        self.blocks_saved = 0
        """Blocks that requests would hold without eviction, less what they hold. A block that
        requests share counts once for each of them."""
        self._starts: dict[str, int] = {}

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Blocks the step needs: vLLM's own count, plus the store where its prefill evicts."""
        needed = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
        )
        if self.ledger is None or self.ledger.quiet(request_id, num_tokens):
            return needed
        self._starts[request_id] = total_computed_tokens
        entry = self.ledger.entry(request_id)
        if self._needs_store(request_id, entry, total_computed_tokens, num_tokens):
            assert entry is not None
            needed += entry.timelines[self.kv_cache_group_id].store_blocks
        return needed

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Allocate positional blocks up to ``num_tokens``, and the store where prefill evicts."""
        new_blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        if self.ledger is None or self.ledger.quiet(request_id, num_tokens):
            return new_blocks
        start = self._starts.pop(request_id)
        entry = self.ledger.admit(request_id)
        if entry is None:
            return new_blocks
        due = self._needs_store(request_id, entry, start, num_tokens)
        self.ledger.observe(entry, start, num_tokens)
        if due:
            self.grant(request_id, entry)
        return new_blocks

    def _needs_store(self, request_id: str, entry: Entry | None, start: int, end: int) -> bool:
        """Whether a step over [start, end) must come with a store: its prefill evicts.

        A store that could never stand beside the request's other blocks is not asked for: the
        request runs unevicted, and the scheduler tries again at every later step.
        """
        assert self.ledger is not None
        if entry is None or self.granted(request_id):
            return False
        timeline = entry.timelines.get(self.kv_cache_group_id)
        return (
            timeline is not None
            and end <= timeline.prefill_end
            and timeline.is_due(end)
            and not self.ledger.last_step(request_id, end)
            and self.ledger.window_ready(entry, start, end)
            and self.ledger.fits(entry, end)
        )

    def retiring(self, request_id: str) -> bool:
        """Whether an eviction of the request is planned whose step was not processed yet."""
        holding = self.holdings.get(request_id)
        return holding is not None and bool(holding.retiring)

    def granted(self, request_id: str) -> bool:
        """Whether a store is waiting for the request's next eviction."""
        holding = self.holdings.get(request_id)
        return holding is not None and bool(holding.granted)

    def grant(self, request_id: str, entry: Entry) -> None:
        """Take a store of fresh blocks; the pool must have them."""
        holding = self.holdings.setdefault(request_id, Holding())
        assert not holding.granted
        store_blocks = entry.timelines[self.kv_cache_group_id].store_blocks
        holding.granted = self.block_pool.get_new_blocks(store_blocks)
        self._save(holding, -store_blocks)

    def evict(self, request_id: str, entry: Entry, end: int) -> GroupEviction:
        """Turn the granted store into the eviction of the step that ends at ``end``.

        The old store and the positional blocks it covers stay until :meth:`retire`: the step,
        and with async scheduling the one before it, still read them.
        """
        holding = self.holdings[request_id]
        old, new = entry.evict(self.kv_cache_group_id, end)
        positional = self.req_to_blocks[request_id]
        eviction = GroupEviction(
            group_id=self.kv_cache_group_id,
            old_tail_start=old,
            tail_start=new,
            old_store=[block.block_id for block in holding.store],
            positional=[
                block.block_id
                for block in positional[old // self.block_size : blocks_for(end, self.block_size)]
            ],
            store=[block.block_id for block in holding.granted],
        )
        holding.retiring.append((eviction, holding.store))
        holding.store, holding.granted = holding.granted, []
        return eviction

    def retire(self, request_id: str, eviction: GroupEviction) -> int:
        """Free what an eviction replaced, once the step that carried it was processed.

        Returns:
            Blocks given back; 0 where the request was preempted, aborted or finished since.

        """
        holding = self.holdings.get(request_id)
        store = holding.take_retiring(eviction) if holding is not None else None
        if store is None:
            return 0
        first, last = (
            eviction.old_tail_start // self.block_size,
            eviction.tail_start // self.block_size,
        )
        self._remove_blocks_in_range(request_id, first, last)
        self.block_pool.free_blocks(store)
        freed = last - first + len(store)
        assert holding is not None
        self._save(holding, freed)
        return freed

    def _save(self, holding: Holding, blocks: int) -> None:
        holding.saved += blocks
        self.blocks_saved += blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Hand over every block of the request: positional, store, granted and retiring."""
        self._starts.pop(request_id, None)
        if self.ledger is not None:
            self.ledger.drop(request_id)
        holding = self.holdings.pop(request_id, Holding())
        self._save(holding, -holding.saved)
        return super().pop_blocks_for_free(request_id) + holding.blocks

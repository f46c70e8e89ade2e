"""The block manager of a KV-cache group that evicts: positional blocks plus a store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.spec import EvictableAttentionSpec
from vllm_kvevict.schedule.step_plan import GroupEviction
from vllm_kvevict.schedule.timeline import RequestTimeline, blocks_for


@dataclass
class Holding:
    """Blocks of one request beside its positional ones.

    ``granted`` are fresh blocks in waiting: owned, not yet part of a plan. ``retiring`` pairs each
    eviction in flight with the blocks that it replaced. ``saved`` are the blocks that evictions
    of the request gave back to the pool, less those they took from it.
    """

    store: list[KVCacheBlock] = field(default_factory=list)
    granted: list[KVCacheBlock] = field(default_factory=list)
    retiring: list[tuple[GroupEviction, list[KVCacheBlock]]] = field(default_factory=list)
    saved: int = 0

    def take_retiring(self, eviction: GroupEviction) -> list[KVCacheBlock]:
        """What an eviction of this request replaced; nothing if it is not one of them."""
        for index, (retiring, blocks) in enumerate(self.retiring):
            if retiring is eviction:
                del self.retiring[index]
                return blocks
        return []

    @property
    def blocks(self) -> list[KVCacheBlock]:
        old = [block for _, blocks in self.retiring for block in blocks]
        return old + self.store + self.granted


class EvictableAttentionManager(FullAttentionManager):
    """Full attention whose old positional blocks give way to a store of S blocks.

    The block table stays positional: a block that an eviction replaces leaves a null block behind,
    so vLLM's slot mapping and its prefix caching need no change. The scheduler binds a ledger
    before the first request; without one (vLLM builds managers for its own sizing too) this is
    vLLM's full-attention manager.

    A store is S fresh blocks where the pool has room, which keeps the prompt in the prefix cache.
    Else the survivors go into blocks that the request has and nobody else: *own* blocks, those of
    the old store and the positional ones it covers. None of them is reachable by hash then.
    """

    ledger: EvictionLedger | None = None
    on_reuse: Callable[[Sequence[KVCacheBlock]], None] | None = None
    """Told which blocks an eviction in place writes to."""

    def __init__(self, kv_cache_spec: EvictableAttentionSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.timeline = kv_cache_spec.timeline
        self.holdings: dict[str, Holding] = {}
        self.blocks_saved = 0
        """Blocks that evictions of running requests gave back to the pool, less those they took.
        A block that requests share counts once, for the eviction that gave it up last."""

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Blocks the step needs: vLLM's own count, plus those of a store that nobody holds.

        With ``apply_admission_cap`` vLLM asks what the whole prompt needs: no more than it holds
        at once where it evicts as it streams in.
        """
        if apply_admission_cap:
            num_tokens = min(num_tokens, self._at_once(request_id, num_tokens))
        needed = super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        if self.ledger is not None and self.ledger.taking:
            needed += sum(block.ref_cnt == 0 for block in self._taking(request_id))
        return needed

    def _at_once(self, request_id: str, num_tokens: int) -> int:
        """Tokens that fill as many blocks as a prompt of ``num_tokens`` holds at once."""
        entry = self.ledger.entry(request_id) if self.ledger is not None else None
        timeline = entry.timelines.get(self.kv_cache_group_id) if entry is not None else None
        if timeline is None or not timeline.timeline.prefill_stride:
            return num_tokens
        gone = timeline.tail_start - timeline.store_blocks * self.block_size
        return gone + timeline.least_blocks(num_tokens) * self.block_size

    def _taking(self, request_id: str) -> tuple[KVCacheBlock, ...]:
        """Blocks of a published store that the request is about to hold."""
        assert self.ledger is not None
        shared = self.ledger.taking.get(request_id)
        if shared is None or request_id in self.holdings:
            return ()
        return shared.groups[self.kv_cache_group_id].store

    def add_local_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Hold what a prefix hit found, and the store that the request takes with it."""
        super().add_local_computed_blocks(request_id, *args, **kwargs)
        if self.ledger is not None and (store := self._taking(request_id)):
            self.block_pool.touch(store)
            self.holdings[request_id] = Holding(store=list(store))

    def _own(self, request_id: str, timeline: RequestTimeline, end: int, hits: int = 0) -> int:
        """Blocks that an eviction at ``end`` replaces and nobody else holds."""
        first = timeline.tail_start // self.block_size
        last = timeline.timeline.tail_start(end) // self.block_size
        positional = self.req_to_blocks.get(request_id, ())
        shared = hits + sum(block.ref_cnt > 1 for block in positional[first:last])
        holding = self.holdings.get(request_id)
        store = sum(block.ref_cnt == 1 for block in holding.store) if holding is not None else 0
        return store + max(0, last - first - shared)

    def gain(self, request_id: str, entry: Entry, end: int) -> int:
        """Blocks that the eviction at ``end`` or after gives back, less those it takes."""
        timeline = entry.timelines[self.kv_cache_group_id]
        end = max(end, timeline.due or 0)
        return self._own(request_id, timeline, end) - timeline.wanted(end)

    def missing(self, request_id: str, entry: Entry, end: int, hits: int = 0) -> int:
        """Blocks of the store that an eviction at ``end`` must find in the pool.

        ``hits`` are blocks of others that the request is about to share.
        """
        timeline = entry.timelines[self.kv_cache_group_id]
        holding = self.holdings.get(request_id)
        granted = len(holding.granted) if holding is not None else 0
        return max(0, timeline.wanted(end) - self._own(request_id, timeline, end, hits) - granted)

    def retiring(self, request_id: str) -> bool:
        """Whether an eviction of the request is planned whose step was not processed yet."""
        holding = self.holdings.get(request_id)
        return holding is not None and bool(holding.retiring)

    def leaving(self, request_id: str) -> int:
        """Blocks that evictions of the request give back when their steps are processed."""
        holding = self.holdings.get(request_id)
        if holding is None:
            return 0
        return sum(block.ref_cnt == 1 for _, blocks in holding.retiring for block in blocks)

    def grant(self, request_id: str, blocks: int) -> None:
        """Take fresh blocks for the request's next eviction; the pool must have them."""
        if blocks:
            holding = self.holdings.setdefault(request_id, Holding())
            holding.granted += self.block_pool.get_new_blocks(blocks)
            self._save(holding, -blocks)

    def evict(self, request_id: str, entry: Entry, end: int, room: int) -> GroupEviction:
        """Choose the blocks of the eviction that follows the step which ends at ``end``.

        Called when the step is scheduled as a whole, so whoever shares a block with it is known.
        What the eviction replaces stays until :meth:`retire`: the step, and with async scheduling
        the one before it, still read it. Own blocks that survivors go to are written after that.

        Args:
            request_id: The request.
            entry: Its entry, advanced.
            end: Tokens in the cache after the step.
            room: Blocks that may be taken from the pool where own ones would do.

        """
        holding = self.holdings.setdefault(request_id, Holding())
        old, new = entry.evict(self.kv_cache_group_id, end)
        first, last = old // self.block_size, new // self.block_size
        positional = self.req_to_blocks[request_id]
        tail = positional[first : blocks_for(end, self.block_size)]
        replaced = positional[first:last]
        positional[first:last] = [self._null_block] * (last - first)
        wanted = entry.timelines[self.kv_cache_group_id].store_blocks
        # Tail first: it leaves the prefix cache first.
        own, old_store = [*holding.store, *reversed(replaced)], holding.store
        missing = wanted - len(holding.granted)
        reused = self._take_own(own, missing) if room < missing else []
        self.grant(request_id, missing - len(reused))
        holding.store, holding.granted = reused + holding.granted, []
        eviction = GroupEviction(
            group_id=self.kv_cache_group_id,
            old_tail_start=old,
            tail_start=new,
            old_store=[block.block_id for block in old_store],
            positional=[block.block_id for block in tail],
            store=[block.block_id for block in holding.store],
            reused=len(reused),
        )
        kept = {block.block_id for block in reused}
        gone = [block for block in own if block.block_id not in kept]
        holding.retiring.append((eviction, gone))
        return eviction

    def _take_own(self, blocks: list[KVCacheBlock], most: int) -> list[KVCacheBlock]:
        """At most so many of ``blocks`` that nobody else holds, reachable by hash no more."""
        own = [block for block in blocks if block.ref_cnt == 1]
        # Stable: those that no hash leads to come first.
        own.sort(key=lambda block: block.block_hash is not None)
        taken = own[:most]
        if self.on_reuse is not None:
            self.on_reuse(taken)
        self.block_pool.evict_blocks({b.block_id for b in taken if b.block_hash is not None})
        return taken

    def retire(self, request_id: str, eviction: GroupEviction) -> int:
        """Free what an eviction replaced, once the step that carried it was processed.

        Returns:
            Blocks given back to the pool, without those that others still hold; 0 where the
            request was preempted, aborted or finished since.

        """
        holding = self.holdings.get(request_id)
        if holding is None:
            return 0
        replaced = holding.take_retiring(eviction)
        freed = sum(block.ref_cnt == 1 for block in replaced)
        self.block_pool.free_blocks(replaced)
        self._save(holding, freed)
        return freed

    def _save(self, holding: Holding, blocks: int) -> None:
        holding.saved += blocks
        self.blocks_saved += blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Hand over every block of the request: positional, store, granted and retiring."""
        if self.ledger is not None:
            self.ledger.drop(request_id)
        holding = self.holdings.pop(request_id, Holding())
        self._save(holding, -holding.saved)
        return super().pop_blocks_for_free(request_id) + holding.blocks

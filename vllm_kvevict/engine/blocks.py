"""The blocks of requests that evict: what an eviction takes and gives, and who holds what.

An eviction takes fresh blocks if the pool has enough of them in addition to the next step of all
running requests; the prompt then stays in the prefix cache. Otherwise the survivors go to the
request's own blocks: those of its old store, and the positional ones before the new tail that no
other request holds. Unless the prefix is shared, there are more than S of them, so a prompt that
fills the whole pool can be evicted. Writing to own blocks is safe for three reasons:

- The owner is known. The step is already scheduled, so a request that hit a block references it.
- The hash goes first. A block that is reachable by hash is unpublished, so no later request hits
  it.
- Steps run in the order of the stream. Earlier steps read the old content, the next step uses the
  new tables, and the worker reads all survivors of a layer before it writes one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvevict.cache.spec import EvictableAttentionSpec
from vllm_kvevict.engine.request import Holding, RequestState
from vllm_kvevict.engine.ring_queue import RingQueue
from vllm_kvevict.engine.table import RequestTable
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.rules.quote import GroupQuote, Quote
from vllm_kvevict.rules.rule import blocks_for
from vllm_kvevict.rules.step_plan import GroupEviction
from vllm_kvevict.stores.retention import Retention

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

BLANK_DIVISOR = 8
"""One part in so many of the pool: while that many of its next free blocks are blank or superseded,
evictions of a conversation do not overwrite its previous state."""


MAX_BLANK = 1024
"""The most of these blocks, because an eviction looks at each of them."""


class EvictableAttentionManager(FullAttentionManager):
    """Block manager of full attention in which a store of S blocks replaces old positional blocks.

    The block table stays positional: a null block takes the index of a block that an eviction
    replaces, so vLLM's slot mapping and prefix caching need no change. The scheduler sets the core
    before the first request. Without a core (vLLM also creates managers for its own sizing) this
    class behaves like vLLM's full-attention manager.

    A store consists of S fresh blocks if the pool has enough, and the prompt then stays in the
    prefix cache. Otherwise the survivors are written to *own* blocks, which no other request holds:
    blocks of the old store, and the positional blocks that the new store covers. These blocks are
    no longer reachable by hash.
    """

    core: "EvictionCore | None" = None

    def __init__(self, kv_cache_spec: EvictableAttentionSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.rule = kv_cache_spec.rule
        self.blocks_saved = 0
        """Blocks that evictions of running requests returned to the pool, less the blocks that they
        took. A shared block counts once, for the eviction that released it last."""

    def _holding(self, state: RequestState) -> Holding:
        return state.holdings.setdefault(self.kv_cache_group_id, Holding())

    def consider(self, state: RequestState | None) -> None:
        """Count the blocks for the admission of a waiting request; for None, only vLLM's count
        applies.

        vLLM asks for every running request in every step and group, so the override is only present
        while a request waits to be admitted.
        """
        self.__dict__.pop("get_num_blocks_to_allocate", None)
        if state is not None and self.kv_cache_group_id in state.progress:
            self.__dict__["get_num_blocks_to_allocate"] = partial(self._blocks_to_admit, state)

    def _blocks_to_admit(
        self,
        state: RequestState,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Return the blocks that the step needs: vLLM's count, the blocks of a reused store, and
        those of the eviction.

        With ``apply_admission_cap``, vLLM asks for the blocks of the whole prompt. If the prompt
        evicts during prefill, this is at most what it holds at once.
        """
        more = 0
        if state.request_id == request_id:
            if apply_admission_cap:
                num_tokens = min(num_tokens, self._at_once(state, num_tokens))
            if not state.holds_blocks:
                state.admitted_at = min(total_computed_tokens, state.replayed_from)
                more = sum(block.ref_cnt == 0 for block in self._reused(state))
                computed = list(new_computed_blocks)
                if self._has_partial_local_hit(computed, num_local_computed_tokens):
                    # The request gets a copy of this block, which vLLM also holds until the copy is
                    # made.
                    computed[-1] = KVCacheBlock(-1, ref_cnt=1)
                # Slots for future drafts are not included.
                end = min(num_tokens, num_tokens_main_model)
                more += self._reservation(state, end, computed)
        return more + super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens,
            num_local_computed_tokens, num_tokens_main_model, *args, **kwargs,
        )  # fmt: skip

    def _at_once(self, state: RequestState, num_tokens: int) -> int:
        """Return the tokens that fill as many blocks as a prompt of ``num_tokens`` holds at
        once."""
        group = self.kv_cache_group_id
        progress = state.progress[group]
        if state.positions is not None:
            blocks = state.positions.sufficient_blocks(group, num_tokens)
        elif progress.rule.prefill_stride:
            blocks = progress.sufficient_blocks(num_tokens)
        else:
            return num_tokens
        gone = progress.tail_start - progress.store_blocks * self.block_size
        return gone + blocks * self.block_size

    def _reused(self, state: RequestState) -> tuple[KVCacheBlock, ...]:
        """Return the blocks of a published store that the request will hold."""
        if state.pending_store is None or self.kv_cache_group_id in state.holdings:
            return ()
        return state.pending_store.groups[self.kv_cache_group_id].store

    def _reservation(
        self, state: RequestState, end: int, computed: Sequence[KVCacheBlock] | None = None
    ) -> int:
        """Return the fresh blocks for the eviction of a request's first step, which ends at
        ``end``.

        Only evictions that must run even if blocks are shared get a reservation. All others can use
        their own blocks. Running requests get none: vLLM would preempt other requests for an
        eviction that can wait.
        """
        progress, start = state.progress[self.kv_cache_group_id], state.admitted_at
        assert self.core is not None and start is not None
        table = self.core.table
        evicts = (
            (table.evicts_shared or progress.rule.every)
            and end <= progress.prefill_end
            and progress.is_due(end)
            and not state.last_step(end)
            and (state.needs.window != "required" or start <= end - table.window)
        )
        return self.quote(state, end, computed).fresh if evicts else 0

    def add_local_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Hold the blocks of a prefix-cache hit, and the store that the request reuses with it."""
        super().add_local_computed_blocks(request_id, *args, **kwargs)
        state = self.core.table.states.get(request_id) if self.core is not None else None
        if state is not None and (store := self._reused(state)):
            self.block_pool.touch(store)
            self._holding(state).store = list(store)

    def reserve(self, state: RequestState, end: int) -> None:
        """Take the blocks for the eviction of an admitted request's step, which ends at ``end``."""
        self._reserve(state, self._reservation(state, end))

    def quote(
        self,
        state: RequestState,
        end: int,
        computed: Sequence[KVCacheBlock] | None = None,
        after_replay: bool = False,
    ) -> GroupQuote:
        """Return the blocks that the group's eviction at ``end`` or later takes and frees.

        Args:
            state: The request.
            end: Number of tokens in the cache.
            computed: Blocks of a prefix-cache hit that a waiting request will hold; None for a
                request that already holds its blocks.
            after_replay: Count blocks as if a replay of the request had already ended.

        """
        progress = state.progress[self.kv_cache_group_id]
        end = max(end, progress.next_eviction or 0)
        first = progress.first_freed(end) // self.block_size
        last = progress.rule.tail_start(end) // self.block_size
        # Number of references to a block that belong to the request.
        own_references = 0 if computed is not None else 1
        table = self.req_to_blocks.get(state.request_id, ()) if computed is None else computed
        replayed = state.replay_block_ids if after_replay else frozenset()

        def others(block: KVCacheBlock) -> int:
            more = block.ref_cnt - own_references
            return more - 1 if more > 0 and block.block_id in replayed else more

        shared = sum(others(block) > 0 for block in table[first:last])
        holding = state.holdings.get(self.kv_cache_group_id)
        store = self._reused(state) if holding is None else holding.store
        if progress.may_share(end):
            store = ()
        own = sum(others(block) == 0 for block in store) + max(0, last - first - shared)
        reserved = len(holding.reserved) if holding is not None else 0
        return GroupQuote(self.kv_cache_group_id, progress.wanted(end), own, reserved)

    def leaving(self, state: RequestState) -> int:
        """Return the blocks that evictions in flight will return to the pool."""
        holding = state.holdings.get(self.kv_cache_group_id)
        if holding is None:
            return 0
        return sum(
            block.ref_cnt == 1 for _, blocks in holding.replaced_in_flight for block in blocks
        )

    def _reserve(self, state: RequestState, blocks: int) -> None:
        """Take fresh blocks for the request's next eviction; the pool must have enough."""
        if blocks:
            holding = self._holding(state)
            holding.reserved += self.block_pool.get_new_blocks(blocks)
            self._save(holding, -blocks)

    def evict(self, state: RequestState, end: int, fresh: int) -> GroupEviction:
        """Choose the blocks of the eviction that follows the step which ends at ``end``.

        Called when the whole step is scheduled, so that it is known which requests share blocks.
        The replaced blocks are kept until :meth:`free_replaced`, because this step and, with async
        scheduling, the previous one still read them. Own blocks that receive survivors are written
        after that.

        Args:
            state: The request; its progress is advanced.
            end: Number of tokens in the cache after the step.
            fresh: Blocks to take from the pool; the rest of the store is own blocks.

        """
        holding = self._holding(state)
        old, new = state.evict(self.kv_cache_group_id, end)
        first, last = old // self.block_size, new // self.block_size
        positional = self.req_to_blocks[state.request_id]
        tail = positional[first : blocks_for(end, self.block_size)]
        replaced = positional[first:last]
        positional[first:last] = [self._null_block] * (last - first)
        self._reserve(state, fresh)
        wanted = state.progress[self.kv_cache_group_id].store_blocks - len(holding.reserved)
        # The tail comes first, because it leaves the prefix cache first.
        own, old_store = [*holding.store, *reversed(replaced)], holding.store
        reused = self._reuse(own, wanted)
        holding.store, holding.reserved = reused + holding.reserved, []
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
        holding.replaced_in_flight.append((eviction, gone))
        return eviction

    def _reuse(self, blocks: list[KVCacheBlock], count: int) -> list[KVCacheBlock]:
        """Return ``count`` of ``blocks`` that no other request holds, and remove their hashes."""
        own = [block for block in blocks if block.ref_cnt == 1] if count else []
        assert self.core is not None
        protected = self.core.retention.is_protected
        # The sort is stable; blocks without a hash come first, and those of states that others may
        # start with come last.
        own.sort(key=lambda block: (block.block_hash is not None, protected(block)))
        reused = own[:count]
        assert len(reused) == count, f"{count} own blocks were quoted, {len(reused)} are there"
        self.block_pool.evict_blocks({b.block_id for b in reused if b.block_hash is not None})
        return reused

    def expendable(self, state: RequestState, end: int) -> int:
        """Return the number of blocks that an eviction at ``end`` may write to without a loss: own
        ones of no state with which another request may start."""
        assert self.core is not None
        progress, holding = state.progress[self.kv_cache_group_id], self._holding(state)
        first = progress.tail_start // self.block_size
        last = progress.rule.tail_start(end) // self.block_size
        own = [*holding.store, *self.req_to_blocks[state.request_id][first:last]]
        protected = self.core.retention.is_protected
        return sum(block.ref_cnt == 1 and not protected(block) for block in own)

    def free_replaced(self, state: RequestState | None, eviction: GroupEviction) -> int:
        """Free the blocks that an eviction replaced, after its step was processed.

        Returns:
            Number of blocks returned to the pool, excluding those that other requests hold; 0 if
            the request was preempted, aborted or finished in the meantime.

        """
        holding = state.holdings.get(self.kv_cache_group_id) if state is not None else None
        if holding is None:
            return 0
        assert state is not None and self.core is not None
        replaced = holding.pop_replaced(eviction)
        freed = sum(block.ref_cnt == 1 for block in replaced)
        if state.makes_links:
            first = eviction.old_tail_start // self.block_size
            found = state.prefix_found // self.block_size
            self.core.retention.free(replaced, max(0, found - first))
        else:
            self.block_pool.free_blocks(replaced)
        self._save(holding, freed)
        return freed

    def _save(self, holding: Holding, blocks: int) -> None:
        holding.net_blocks_freed += blocks
        self.blocks_saved += blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Return every block of the request: positional, store, reserved, replaced in flight, and
        those that it keeps for the layers with a window."""
        blocks = super().pop_blocks_for_free(request_id)
        core = self.core
        if core is not None and (state := core.table.states.get(request_id)) is not None:
            core.return_to_waiting(state)
            holding = state.holdings.pop(self.kv_cache_group_id, None)
            if holding is not None:
                self._save(holding, -holding.net_blocks_freed)
                blocks = blocks + holding.blocks
            blocks = blocks + state.take_window()
            core.retention.used(blocks)
        return blocks


@dataclass(eq=False)
class EvictionCore:
    """The objects that the whole engine uses, and operations on all groups of a request.

    Args:
        scheduler: vLLM's scheduler.
        table: The table of all requests.
        turns: The queue of the ring slots.
        managers: The block managers that evict, by KV-cache group.
        counters: Totals of the metrics.

    """

    scheduler: "Scheduler"
    table: RequestTable
    turns: RingQueue
    managers: Mapping[int, EvictableAttentionManager]
    counters: Counters
    _candidate: RequestState | None = None

    @cached_property
    def retention(self) -> Retention:
        """The order in which blocks leave the KV cache."""
        return Retention(self.cache.block_pool)

    @property
    def cache(self) -> "KVCacheManager":
        return self.scheduler.kv_cache_manager

    @property
    def free(self) -> int:
        return self.cache.block_pool.get_num_free_blocks()

    @property
    def free_after_step(self) -> int:
        """Free blocks, less the blocks that running requests may take in the next step."""
        return self.free - self._next_step(bool(self.scheduler._inflight_prefills))

    def _next_step(self, prefills: bool) -> int:
        """Return the blocks that requests may take in the next step."""
        scheduler = self.scheduler
        chunk = scheduler.max_num_scheduled_tokens if prefills else 0
        sizes = self.cache.coordinator.group_block_sizes
        return sum(len(scheduler.running) + blocks_for(chunk, size) for size in sizes)

    def make_way(self) -> None:
        """Let superseded blocks be the next ones that a step takes, if it would take others that
        are cached."""
        scheduler = self.scheduler
        self.retention.make_way(
            self._next_step(bool(scheduler.waiting or scheduler._inflight_prefills))
        )

    def consider(self, state: RequestState | None) -> None:
        """Set the waiting request that may be admitted next; None if there is none."""
        if state is not self._candidate:
            self._candidate = state
            for manager in self.managers.values():
                manager.consider(state)

    def begin(self, state: RequestState) -> None:
        """Record that a waiting request gets its first blocks."""
        self.consider(None)
        self.table.admit(state)

    def admit(self, state: RequestState, end: int) -> None:
        """Admit a waiting request that has the blocks of its first step, which ends at ``end``."""
        self.begin(state)
        for group in state.progress:
            self.managers[group].reserve(state, end)

    def return_to_waiting(self, state: RequestState) -> None:
        """Return a request to WAITING before its blocks are freed. Idempotent."""
        if state.holds_blocks:
            self.turns.leave(state)
            self.table.return_to_waiting(state.request_id)

    def remove(self, request_id: str) -> None:
        """Remove a request after its blocks are freed."""
        if self._candidate is not None and self._candidate.request_id == request_id:
            self.consider(None)
        self.table.remove(request_id)

    def own_blocks(self, state: RequestState, limit: int) -> int:
        """Return the blocks that the pool gets when a request ends, counted up to ``limit``.

        Counts the blocks from the end of the block table back to the first block that another
        request holds, and the blocks of the stores.
        """
        count = 0
        for group, manager in self.managers.items():
            holding = state.holdings.get(group)
            if holding is not None:
                count += sum(block.ref_cnt == 1 for block in islice(holding.blocks, limit))
            for block in reversed(manager.req_to_blocks.get(state.request_id, ())):
                if count >= limit or block.ref_cnt != 1 or block.is_null:
                    break
                count += 1
        return count

    def quote(
        self, state: RequestState, groups: Sequence[int], end: int, after_replay: bool = False
    ) -> Quote:
        """Return the blocks that an eviction of ``groups`` at ``end``, or when it is due, takes and
        frees."""
        quotes = (self.managers[g].quote(state, end, after_replay=after_replay) for g in groups)
        return Quote(tuple(quotes))

    def evict(
        self, state: RequestState, quote: Quote, end: int, superseded: bool = False
    ) -> list[GroupEviction]:
        """Evict the groups of a quote, for which the pool has the fresh blocks.

        If the pool has more free blocks than these and the next step of all running requests need,
        survivors are written to fresh blocks, and the former blocks stay in the prefix cache.
        With ``superseded`` they stay only if fresh blocks cost nothing
        (:mod:`vllm_kvevict.stores.retention`), or if they are of a state with which another request
        may start.

        Args:
            state: The request.
            quote: What the eviction takes.
            end: Number of tokens in the cache after the step.
            superseded: True if no request is expected to start with the last store of the request.

        """
        spare, evictions = self.free_after_step - quote.fresh, []
        taken = sum(part.store - part.reserved for part in quote.parts)
        eighth = self.cache.block_pool.num_gpu_blocks // BLANK_DIVISOR
        blank = max(taken, min(eighth, MAX_BLANK))
        overwrites = superseded and not self.retention.costs_nothing(blank)
        for part in quote.parts:
            manager, fresh = self.managers[part.group_id], part.fresh
            more = part.store - part.reserved - fresh
            if overwrites:
                more = max(0, more - manager.expendable(state, end))
            if more <= spare:
                fresh, spare = fresh + more, spare - more
            evictions.append(manager.evict(state, end, fresh))
        return evictions


def register_spec() -> None:
    """Register the block manager of :class:`EvictableAttentionSpec` with vLLM. Idempotent."""
    # vLLM registers its own specs only into an empty registry, so they must come first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        EvictableAttentionSpec, EvictableAttentionManager, uniform_type_base_spec=FullAttentionSpec
    )

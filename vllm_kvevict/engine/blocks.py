"""The blocks of requests that evict: what an eviction takes and gives, and who holds what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from vllm_kvevict.timeline.quote import GroupQuote, Quote
from vllm_kvevict.timeline.rule import blocks_for
from vllm_kvevict.timeline.step_plan import GroupEviction

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler


class EvictableAttentionManager(FullAttentionManager):
    """Full attention whose old positional blocks give way to a store of S blocks.

    The block table stays positional: a block that an eviction replaces leaves a null block there,
    so vLLM's slot mapping and its prefix caching need no change. The scheduler binds the core
    before the first request; without one (vLLM builds managers for its own sizing too) this is
    vLLM's full-attention manager.

    A store is S fresh blocks where the pool has enough: the prompt stays in the prefix cache. Else
    the survivors go into blocks that no other request holds: *own* blocks, those of the old store
    and the positional ones it covers. None of them is reachable by hash then.
    """

    core: "EvictionCore | None" = None

    def __init__(self, kv_cache_spec: EvictableAttentionSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.timeline = kv_cache_spec.timeline
        self.blocks_saved = 0
        """Blocks that evictions of running requests gave back to the pool, less those they took.
        A block that requests share counts once, for the eviction that gave it up last."""

    def _holding(self, state: RequestState) -> Holding:
        return state.holdings.setdefault(self.kv_cache_group_id, Holding())

    def consider(self, state: RequestState | None) -> None:
        """Count the blocks of a waiting request's admission; vLLM's count alone for None.

        vLLM asks about running ones in every step and group: not even an override is in its way.
        """
        self.__dict__.pop("get_num_blocks_to_allocate", None)
        if state is not None and self.kv_cache_group_id in state.timelines:
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
        """Blocks the step needs: vLLM's count, those of a store it reuses, those of its eviction.

        With ``apply_admission_cap`` vLLM asks what the whole prompt needs: no more than it holds
        at once where it evicts as it streams in.
        """
        more = 0
        if state.request_id == request_id:
            if apply_admission_cap:
                num_tokens = min(num_tokens, self._at_once(state, num_tokens))
            if not state.holds_blocks:
                state.admitted_at = total_computed_tokens
                more = sum(block.ref_cnt == 0 for block in self._reused(state))
                computed = list(new_computed_blocks)
                if self._has_partial_local_hit(computed, num_local_computed_tokens):
                    # The request gets a copy of this block, which vLLM holds too until it is made.
                    computed[-1] = KVCacheBlock(-1, ref_cnt=1)
                # Without the slots of drafts that are still to come.
                end = min(num_tokens, num_tokens_main_model)
                more += self._reservation(state, end, computed)
        return more + super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens,
            num_local_computed_tokens, num_tokens_main_model, *args, **kwargs,
        )  # fmt: skip

    def _at_once(self, state: RequestState, num_tokens: int) -> int:
        """Tokens that fill as many blocks as a prompt of ``num_tokens`` holds at once."""
        if not (timeline := state.timelines[self.kv_cache_group_id]).timeline.prefill_stride:
            return num_tokens
        gone = timeline.tail_start - timeline.store_blocks * self.block_size
        return gone + timeline.least_blocks(num_tokens) * self.block_size

    def _reused(self, state: RequestState) -> tuple[KVCacheBlock, ...]:
        """Blocks of a published store that the request is about to hold."""
        if state.pending_store is None or self.kv_cache_group_id in state.holdings:
            return ()
        return state.pending_store.groups[self.kv_cache_group_id].store

    def _reservation(
        self, state: RequestState, end: int, computed: Sequence[KVCacheBlock] | None = None
    ) -> int:
        """Fresh blocks that the eviction of a request's first step, which ends at ``end``, takes.

        Only where it must run whatever is shared: own blocks are enough for all others, and a
        request that runs is given none: vLLM would preempt others for it, where it can wait.
        """
        timeline, start = state.timelines[self.kv_cache_group_id], state.admitted_at
        assert self.core is not None and start is not None
        table = self.core.table
        evicts = (
            table.evicts_shared
            and end <= timeline.prefill_end
            and timeline.is_due(end)
            and not state.last_step(end)
            and (state.needs.window != "required" or start <= end - table.window)
        )
        return self.quote(state, end, computed).fresh if evicts else 0

    def add_local_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Hold what a prefix hit found, and the store that the request reuses with it."""
        super().add_local_computed_blocks(request_id, *args, **kwargs)
        state = self.core.table.states.get(request_id) if self.core is not None else None
        if state is not None and (store := self._reused(state)):
            self.block_pool.touch(store)
            self._holding(state).store = list(store)

    def reserve(self, state: RequestState, end: int) -> None:
        """Take what the eviction of an admitted request's step, which ends at ``end``, needs."""
        self._reserve(state, self._reservation(state, end))

    def quote(
        self,
        state: RequestState,
        end: int,
        computed: Sequence[KVCacheBlock] | None = None,
        after_replay: bool = False,
    ) -> GroupQuote:
        """What the group's eviction at ``end`` or after takes and gives.

        Args:
            state: The request.
            end: Tokens in the cache.
            computed: Blocks of a prefix hit that a waiting request is about to hold; None for a
                request that holds its blocks.
            after_replay: Count blocks that a replay of the request holds as if it were over.

        """
        timeline = state.timelines[self.kv_cache_group_id]
        end = max(end, timeline.next_eviction or 0)
        first = timeline.tail_start // self.block_size
        last = timeline.timeline.tail_start(end) // self.block_size
        # References to a block that are the request's own.
        mine = 0 if computed is not None else 1
        table = self.req_to_blocks.get(state.request_id, ()) if computed is None else computed
        replayed = state.replay_block_ids if after_replay else frozenset()

        def others(block: KVCacheBlock) -> int:
            more = block.ref_cnt - mine
            return more - 1 if more > 0 and block.block_id in replayed else more

        shared = sum(others(block) > 0 for block in table[first:last])
        holding = state.holdings.get(self.kv_cache_group_id)
        store = self._reused(state) if holding is None else holding.store
        own = sum(others(block) == 0 for block in store) + max(0, last - first - shared)
        reserved = len(holding.reserved) if holding is not None else 0
        return GroupQuote(self.kv_cache_group_id, timeline.wanted(end), own, reserved)

    def leaving(self, state: RequestState) -> int:
        """Blocks that evictions of the request give back when their steps are processed."""
        holding = state.holdings.get(self.kv_cache_group_id)
        if holding is None:
            return 0
        return sum(
            block.ref_cnt == 1 for _, blocks in holding.replaced_in_flight for block in blocks
        )

    def _reserve(self, state: RequestState, blocks: int) -> None:
        """Take fresh blocks for the request's next eviction; the pool must have them."""
        if blocks:
            holding = self._holding(state)
            holding.reserved += self.block_pool.get_new_blocks(blocks)
            self._save(holding, -blocks)

    def evict(self, state: RequestState, end: int, fresh: int) -> GroupEviction:
        """Choose the blocks of the eviction that follows the step which ends at ``end``.

        Called when the step is scheduled as a whole, so it is known who shares blocks with whom.
        What the eviction replaces stays until :meth:`retire`: the step, and with async scheduling
        the one before it, still read it. Own blocks that survivors go to are written after that.

        Args:
            state: The request, whose timeline is advanced.
            end: Tokens in the cache after the step.
            fresh: Blocks to take from the pool; own ones are the rest of the store.

        """
        holding = self._holding(state)
        old, new = state.evict(self.kv_cache_group_id, end)
        first, last = old // self.block_size, new // self.block_size
        positional = self.req_to_blocks[state.request_id]
        tail = positional[first : blocks_for(end, self.block_size)]
        replaced = positional[first:last]
        positional[first:last] = [self._null_block] * (last - first)
        self._reserve(state, fresh)
        wanted = state.timelines[self.kv_cache_group_id].store_blocks - len(holding.reserved)
        # Tail first: it leaves the prefix cache first.
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
        """So many of ``blocks`` that no other request holds, reachable by hash no more."""
        own = [block for block in blocks if block.ref_cnt == 1] if count else []
        # Stable: those that no hash leads to come first.
        own.sort(key=lambda block: block.block_hash is not None)
        reused = own[:count]
        assert len(reused) == count, f"{count} own blocks were quoted, {len(reused)} are there"
        self.block_pool.evict_blocks({b.block_id for b in reused if b.block_hash is not None})
        return reused

    def retire(self, state: RequestState | None, eviction: GroupEviction) -> int:
        """Free what an eviction replaced, once the step that carried it was processed.

        Returns:
            Blocks given back to the pool, without those that others still hold; 0 where the
            request was preempted, aborted or finished since.

        """
        holding = state.holdings.get(self.kv_cache_group_id) if state is not None else None
        if holding is None:
            return 0
        replaced = holding.pop_replaced(eviction)
        freed = sum(block.ref_cnt == 1 for block in replaced)
        self.block_pool.free_blocks(replaced)
        self._save(holding, freed)
        return freed

    def _save(self, holding: Holding, blocks: int) -> None:
        holding.net_blocks_freed += blocks
        self.blocks_saved += blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Hand over every block of the request: positional, store, reserved and retiring."""
        blocks = super().pop_blocks_for_free(request_id)
        core = self.core
        if core is not None and (state := core.table.states.get(request_id)) is not None:
            core.release(state)
            holding = state.holdings.pop(self.kv_cache_group_id, None)
            if holding is not None:
                self._save(holding, -holding.net_blocks_freed)
                blocks = blocks + holding.blocks
        return blocks


@dataclass(eq=False)
class EvictionCore:
    """The objects that the whole engine works on, and operations on all groups of a request.

    Args:
        scheduler: vLLM's.
        table: All requests.
        turns: Ring slots, and the requests that are looked at in a step.
        managers: The block managers that evict, by KV-cache group.
        counters: Totals.

    """

    scheduler: "Scheduler"
    table: RequestTable
    turns: RingQueue
    managers: Mapping[int, EvictableAttentionManager]
    counters: Counters
    _candidate: RequestState | None = None

    @property
    def cache(self) -> "KVCacheManager":
        return self.scheduler.kv_cache_manager

    @property
    def free(self) -> int:
        return self.cache.block_pool.get_num_free_blocks()

    @property
    def free_after_step(self) -> int:
        """Free blocks, less what running requests may take in the next step."""
        scheduler = self.scheduler
        chunk = scheduler.max_num_scheduled_tokens if scheduler._inflight_prefills else 0
        next_step = sum(
            len(scheduler.running) + blocks_for(chunk, size)
            for size in self.cache.coordinator.group_block_sizes
        )
        return self.free - next_step

    def consider(self, state: RequestState | None) -> None:
        """Note the waiting request that may be admitted next; None while none may."""
        if state is not self._candidate:
            self._candidate = state
            for manager in self.managers.values():
                manager.consider(state)

    def begin(self, state: RequestState) -> None:
        """Note that a waiting request gets its first blocks."""
        self.consider(None)
        self.table.admit(state)

    def admit(self, state: RequestState, end: int) -> None:
        """A waiting request has the blocks of its first step, which ends at ``end``."""
        self.begin(state)
        for group in state.timelines:
            self.managers[group].reserve(state, end)

    def release(self, state: RequestState) -> None:
        """Return a request to WAITING before its blocks are freed. Idempotent."""
        if state.holds_blocks:
            self.turns.leave(state)
            self.table.release(state.request_id)

    def remove(self, request_id: str) -> None:
        """Forget a request whose blocks are freed."""
        if self._candidate is not None and self._candidate.request_id == request_id:
            self.consider(None)
        self.table.remove(request_id)

    def own_blocks(self, state: RequestState, most: int) -> int:
        """Blocks that the pool gets when a request ends, as far as it takes to count ``most``.

        From the end of its table on, up to a block that others hold, and its stores.
        """
        found = 0
        for group, manager in self.managers.items():
            holding = state.holdings.get(group)
            if holding is not None:
                found += sum(block.ref_cnt == 1 for block in islice(holding.blocks, most))
            for block in reversed(manager.req_to_blocks.get(state.request_id, ())):
                if found >= most or block.ref_cnt != 1 or block.is_null:
                    break
                found += 1
        return found

    def quote(
        self, state: RequestState, groups: Sequence[int], end: int, after_replay: bool = False
    ) -> Quote:
        """What an eviction of ``groups`` at ``end``, or when it is due, takes and gives."""
        quotes = (self.managers[g].quote(state, end, after_replay=after_replay) for g in groups)
        return Quote(tuple(quotes))

    def evict(self, state: RequestState, quote: Quote, end: int) -> list[GroupEviction]:
        """Evict the groups of a quote that the pool has the fresh blocks for.

        Where the pool has more than that beside the next step of all running requests, survivors
        go to fresh blocks, which leaves the prompt in the prefix cache.
        """
        spare, evictions = self.free_after_step - quote.fresh, []
        for part in quote.parts:
            fresh, more = part.fresh, part.store - part.reserved - part.fresh
            if more <= spare:
                fresh, spare = fresh + more, spare - more
            evictions.append(self.managers[part.group_id].evict(state, end, fresh))
        return evictions


def register_spec() -> None:
    """Tell vLLM which block manager serves :class:`EvictableAttentionSpec`. Idempotent."""
    # vLLM registers its own specs only into an empty registry: they must come first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        EvictableAttentionSpec, EvictableAttentionManager, uniform_type_base_spec=FullAttentionSpec
    )

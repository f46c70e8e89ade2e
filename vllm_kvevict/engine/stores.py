"""Stores that evictions at a point leave for other requests, and what is computed over them.

A store is published under everything that it depends on: vLLM's hash of the blocks before the
point, the tokens of the last block, the point, the policy, the protected tokens, and the size of
the store in every group. A request with the same key is admitted at the point. Its table begins
with null blocks, its positional blocks from the tail start on are those of the first request, and
it holds the store. While one request prefills towards a store, others with the same key wait.

What is computed between the point and the next eviction depends on the store and on all tokens
alone. Full blocks of it are published as (store, vLLM's hash of the block). Blocks of a store
carry a hash that no prefix leads to, so vLLM's pool keeps idle ones like cached blocks, and a
store is found only while all its blocks have theirs. A later eviction of one holder makes a store
of its own. Layers that attend within a window belong to a store with their last blocks before its
point (:mod:`vllm_kvevict.engine.windows`).
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.chain import Chain, Link
from vllm_kvevict.engine.published import PublishedGroup, PublishedStore
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.suffix_cache import SuffixCache
from vllm_kvevict.engine.windows import Windows
from vllm_kvevict.rules.rule import blocks_for
from vllm_kvevict.rules.step_plan import GroupEviction, ReusedStore, StepPlan
from vllm_kvevict.stores.key import ShareKey, share_key
from vllm_kvevict.stores.retention import MARK, is_superseded

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

MAX_UNMADE_KEYS = 256
"""Maximum number of remembered keys of requests that reached the point and could not evict
there."""

MAX_NAMES = 1 << 15
"""Maximum number of remembered names of stores, of which each takes some 150 bytes."""

STORES_EXAMINED_PER_STEP = 16
"""Number of published stores that a step examines. Examining all takes 22 to 25 ms at 14,000."""


class PublishedStores:
    """Finds stores for requests, and publishes the stores that evictions make.

    A published store is held by its maker and by the requests that reuse it. Its blocks carry a
    hash that no prefix leads to, so vLLM's pool keeps them like cached blocks when they are idle:
    they leave least recently used first, and a store that lost one block is never found again.

    Args:
        core: The engine core.
        enabled: False if no store may be shared.

    """

    def __init__(self, core: EvictionCore, enabled: bool) -> None:
        self._manager = manager = core.cache
        self._table = core.table
        self._managers = core.managers
        self._totals = core.counters
        self.windows = Windows(core)
        """The groups that do not evict."""
        self.enabled = enabled and manager.enable_caching and self.windows.complete
        self.idle = 0
        """Number of published stores that no request holds, as last examined."""
        self.kept_bytes = 0
        """Bytes of host memory that hold stores, on all ranks."""
        self.suffixes = SuffixCache(manager.block_pool.hash_block_size, core.managers, self.windows)
        self._published: OrderedDict[ShareKey, PublishedStore] = OrderedDict()
        """By key, the one that was examined or made last at the end."""
        self._retention = core.retention
        self._promised: dict[str, PublishedStore] = {}
        """Stores for which requests returned to the queue, by request id, until they start."""
        self._names: OrderedDict[str, None] = OrderedDict()
        """Of the stores that were made, the last one at the end."""
        self._unmade: dict[ShareKey, None] = {}
        self._awaited: dict[ShareKey, None] = {}
        """Stores that waiting requests wait for a running request to make."""
        self._unpublished: dict[str, RequestState] = {}
        """Requests that made a store at a position whose tokens are not known yet."""
        self._soon: set[ShareKey] | None = None
        self._soon_admitted = 0
        self._made = 0

    def read_key(self, state: RequestState) -> None:
        """Set the store key of a request that arrives, or the keys of its chain."""
        state.key_length = state.request.num_tokens
        if not self.enabled or not state.needs.shares_stores or not state.has_eviction_points:
            return
        if state.positions is not None:
            if state.chain is None:
                state.chain = Chain(
                    state.positions,
                    state.progress,
                    self._manager.block_pool.hash_block_size,
                    state.options.policy,
                    state.options.protect_first,
                    state.needs.reads_share,
                )
            state.chain.extend(state.request)
            return
        state.store_key = share_key(
            state.request,
            state.progress,
            self._manager.block_pool.hash_block_size,
            state.options.policy,
            state.options.protect_first,
            state.needs.reads_share,
            state.context_end if state.needs.window == "optional" else 0,
        )
        if (
            state.store_key is not None
            and state.store_key.point == state.options.at
            and not self._table.evicts_shared
            # It may hold nearly two stores then.
            and self._table.config.max_budget is None
            and not any(rule.prefill_stride for rule in state.rules.values())
        ):
            state.share_context()

    def read_key_again(self, state: RequestState) -> None:
        """Set the store key of a waiting request that was preempted. Its prefill includes its
        answer, on which its points and the share of tokens that its budget keeps may depend."""
        request = state.request
        if (
            request.num_preemptions
            and request.num_tokens != state.key_length
            and state.replay_store is None
        ):
            state.begin()
            self.read_key(state)

    def waits(self, state: RequestState) -> bool:
        """Return whether a waiting request should wait for a store that a running one is about to
        make."""
        keys = state.reusable
        if not keys or not self._may_reuse(state) or not (making := self._making()):
            return False
        for key in reversed(keys):
            if self.has(key):
                return False
            if self._is_coming(key, making):
                state.store_key = key
                self._awaited[key] = None
                return True
        return False

    def ready(self) -> list[ShareKey]:
        """Return the stores about which something changed since the last call, so that requests
        that wait for them should be examined again."""
        self._soon = None
        if not self._awaited:
            return []
        making = self._making()
        changed = [key for key in self._awaited if not self._is_coming(key, making)]
        for key in changed:
            del self._awaited[key]
        return changed

    def _making(self) -> set[ShareKey]:
        """Return the stores that running requests are about to make.

        The set is made once a step, and grows with the requests that the step admits. It may
        contain stores of requests that the step preempts, until the next one.
        """
        admitted = self._table.admitted
        if self._soon is None:
            self._soon, states = set(), list(self._table.prefilling.values())
        else:
            states = admitted[self._soon_admitted :]
        self._soon_admitted = len(admitted)
        for state in states:
            computed = state.request.num_computed_tokens
            if state.chain is not None:
                if state.on_chain:
                    self._soon.update(state.chain.keys[state.chain.before(computed + 1) :])
            elif state.store_key is not None and state.store_key.point > computed:
                self._soon.add(state.store_key)
        return self._soon

    def _is_coming(self, key: ShareKey, making: set[ShareKey]) -> bool:
        return key in making and key not in self._unmade and not self.has(key)

    def _may_reuse(self, state: RequestState) -> bool:
        return self._manager.prefix_cache_lookup_enabled(state.request)

    def _in_pool(self, key: ShareKey) -> bool:
        store = self._published.get(key)
        return store is not None and store.intact

    def has(self, key: ShareKey) -> bool:
        """Return whether the complete store of a key is available."""
        return self._in_pool(key)

    def copy(self, plan: StepPlan) -> None:
        """Add the stores to copy out of the KV cache, and back, to the plan."""

    def reset(self) -> None:
        """Called after a reset of the prefix cache: its stores may no longer be reused."""
        for store in list(self._published.values()):
            self._drop(store)

    def executed(self, plan: StepPlan | None, news: Sequence[Any]) -> list[PublishedStore]:
        """Record that a step was executed.

        Args:
            plan: The plan of the step, if it had one.
            news: Reports of the workers about stores outside the KV cache.

        Returns:
            The stores that could not be restored. What was computed over them is wrong.

        """
        return []

    def unscored(self, evictions: Sequence[tuple[str, int]]) -> list[PublishedStore]:
        """Drop the stores of evictions with a policy that failed, which keep other tokens than
        their keys say.

        Args:
            evictions: Requests, each with the first block of a store that it made.

        Returns:
            The stores. What was computed over them is not what their requests asked for.

        """
        owners = [self._retention.owners(block_id) for _, block_id in evictions]
        lost = {one for each in owners for one in each if isinstance(one, PublishedStore)}
        for request_id, _ in evictions:
            if (state := self._table.states.get(request_id)) is not None:
                # A step in flight may have made another one over it.
                last = state.last_store
                lost |= {last} if last is not None and last is not state.reused_store else set()
                state.on_chain, state.unpublished = False, None
        for store in lost:
            self._lose(store)
        return list(lost)

    def _lose(self, store: PublishedStore) -> None:
        """Drop a store whose content is wrong."""
        self._drop(store)

    def request_finished(self, state: RequestState) -> bool:
        """Record that a request ends, before its blocks are freed.

        Returns:
            True if another server that takes the request over will find its store.

        """
        if state.unpublished is not None:
            self._resolve_late(state)
        self._unpublished.pop(state.request_id, None)
        self._forget_promise(state)
        return False

    def find(self, state: RequestState) -> PublishedStore | None:
        """Return the store that a waiting request may start with; None if there is none."""
        if not self._may_reuse(state):
            return None
        found = (key for key in reversed(state.reusable) if self._in_pool(key))
        key = next(found, None)
        return self._published[key] if key is not None else None

    def hit(self, state: RequestState) -> "tuple[KVCacheBlocks, int]":
        """Return the blocks and the number of tokens of the reused store and of the blocks after
        it."""
        store = state.pending_store
        assert store is not None
        after, num_tokens = self.suffixes.find(state, store, state.reuse_cap)
        null = self._manager.block_pool.null_block
        sizes = self._manager.coordinator.group_block_sizes
        blocks: list[Sequence[KVCacheBlock]] = []
        for group, part in sorted(store.groups.items()):
            size, tail = sizes[group], part.tail
            if after:
                full = (store.key.point - part.tail_start) // size
                index = self.suffixes.groups.index(group)
                tail = *tail[:full], *(each[index] or null for each in after)
            blocks.append([*[null] * (part.tail_start // size), *tail])
        return self._manager.create_kv_cache_blocks(tuple(blocks)), num_tokens

    def publish(
        self, state: RequestState, end: int, evictions: Sequence[GroupEviction]
    ) -> PublishedStore | None:
        """Publish the blocks that a request keeps after its evictions of the step that ends at
        ``end``.

        They are published only if they match the request's key, and if every block after the store
        is full or the last one.

        Returns:
            The store, for which the worker must keep the head split; None if none is published.

        """
        if state.evicts_on_tokens:
            return self._publish_link(state, end)
        key = state.store_key
        made = {eviction.group_id: eviction for eviction in evictions}
        if (
            key is None
            or key.point != end
            or state.computed_valid != end
            or any(eviction.old_tail_start or eviction.old_store for eviction in evictions)
            or made.keys() != {group for group, blocks in key.stores if blocks}
            or self._in_pool(key)
        ):
            return None
        groups = {}
        for group in state.progress:
            tail_start = made[group].tail_start if group in made else 0
            size = self._managers[group].block_size
            positional = self._managers[group].req_to_blocks[state.request_id]
            tail = positional[tail_start // size : blocks_for(end, size)]
            full = tail[: (end - tail_start) // size]
            if any(block.block_hash is None for block in full):
                return None
            if len(tail) > len(full) and tail[-1].block_hash is not None:
                return None
            blocks = state.holdings[group].store if group in made else ()
            groups[group] = PublishedGroup(tail_start, tuple(blocks), tuple(tail))
        self._totals.stores_published += 1
        return self._enter(key, groups | self._keep_window(state, end))

    def _keep_window(self, state: RequestState, end: int) -> dict[int, PublishedGroup]:
        """Let a request keep, with the store that it makes at ``end``, the blocks of layers that
        attend within a window."""
        groups = self.windows.blocks_of(state.request_id, end)
        self.windows.keep(state, groups)
        return groups

    def _publish_link(self, state: RequestState, end: int) -> PublishedStore | None:
        """Publish the next store of a request's chain, now or when its tokens are known."""
        if not state.makes_links:
            return None
        groups = {}
        for group, progress in state.progress.items():
            size = self._managers[group].block_size
            positional = self._managers[group].req_to_blocks[state.request_id]
            tail = positional[progress.tail_start // size : blocks_for(end, size)]
            holding = state.holdings.get(group)
            store = holding.store if holding is not None else ()
            groups[group] = PublishedGroup(progress.tail_start, tuple(store), tuple(tail))
        state.unpublished = Link(end, groups | self._keep_window(state, end))
        self._unpublished[state.request_id] = state
        return self._resolve(state)

    def _resolve(self, state: RequestState) -> PublishedStore | None:
        """Publish the store of a request that was made at a position whose tokens are known now.

        It is a store of the chain only if every eviction ran at its position.
        """
        link, chain = state.unpublished, state.chain
        assert chain is not None
        if link is None:
            self._unpublished.pop(state.request_id, None)
            return None
        if link.point > state.request.num_tokens:
            return None
        del self._unpublished[state.request_id]
        state.unpublished = None
        chain.extend(state.request)
        key = chain.keys[state.links] if state.links < len(chain.keys) else None
        if key is None or not link.is_of(key):
            state.on_chain = False
            self.windows.let_go(state)
            return None
        state.links += 1
        if self._in_pool(key):
            # Requests may hold the equal store.
            state.last_store = self._published[key]
            self.windows.keep_of(state, state.last_store)
            return None
        if state.computed_valid == link.point:
            # Up to the first eviction, blocks have vLLM's hash, the last one only now.
            self._manager.coordinator.cache_blocks(state.request, link.point)
        self._totals.stores_published += 1
        state.last_store = store = self._enter(key, link.groups)
        self._continues(state.reused_store, store)
        return store

    def extends(self, state: RequestState, end: int) -> None:
        """Called before a request evicts at ``end`` over its last store, whose blocks the eviction
        may write to."""

    def promise(self, state: RequestState) -> None:
        """Record that a request returned to the queue to start with the store that it waited
        for."""
        self._forget_promise(state)
        if (key := state.store_key) is not None and self._in_pool(key):
            store = self._promised[state.request_id] = self._published[key]
            store.awaited.add(state.request_id)

    def started(self, state: RequestState) -> None:
        """Record that a request holds its first blocks."""
        self._forget_promise(state)

    def _forget_promise(self, state: RequestState) -> None:
        if (store := self._promised.pop(state.request_id, None)) is not None:
            store.awaited.discard(state.request_id)

    def supersede(self, state: RequestState, end: int) -> bool:
        """Return True if no request is expected to start with the last store of a request that
        evicts at ``end`` over it, and record it."""
        former, prompt_end, chain = state.last_store, state.request.num_prompt_tokens, state.chain
        if not state.makes_links or chain is None or former is None:
            return False
        following = chain.keys[state.links] if state.links < len(chain.keys) else None
        former.superseded = is_superseded(
            former,
            of_prompt=former.key.point <= prompt_end < end,
            parted=following is None or following.name not in self._names,
            awaited=bool(former.awaited),
        )
        return former.superseded

    def _continues(self, base: PublishedStore | None, store: PublishedStore) -> None:
        """Record that a store was made by a request that started with another one."""

    def resolve(self) -> None:
        """Publish the stores at positions whose tokens are known by now."""
        for state in list(self._unpublished.values()):
            self._resolve_late(state)

    def _resolve_late(self, state: RequestState) -> None:
        store = self._resolve(state)
        if store is not None:
            state.compute_over(store)

    def renew(self, store: PublishedStore) -> None:
        """Move a store that was in use to the end of the pool's queue, so that it leaves after the
        blocks computed over it."""
        if store.intact:
            self._retention.renew(store)

    def passed(self, state: RequestState, end: int) -> None:
        """Record that a step ends at ``end``. If this is the point and there is no store, no
        request waits for it any longer."""
        if state.chain is not None:
            self._passed_link(state, state.chain, end)
            return
        key = state.store_key
        if key is not None and key.point == end and key not in self._published:
            self._give_up(key)

    def _passed_link(self, state: RequestState, chain: Chain, end: int) -> None:
        key = chain.keys[state.links] if state.links < len(chain.keys) else None
        if key is not None and key.point <= end and state.unpublished is None:
            # It did not evict at its position, so what it computes from here on is its own.
            state.on_chain = False
            self._give_up(key)

    def _give_up(self, key: ShareKey) -> None:
        if len(self._unmade) == MAX_UNMADE_KEYS:
            del self._unmade[next(iter(self._unmade))]
        self._unmade[key] = None

    def plan(self, state: RequestState) -> list[ReusedStore]:
        """Return the groups of the store that an admitted request reuses, for the workers."""
        assert state.pending_store is not None
        return [
            ReusedStore(group, part.tail_start, [block.block_id for block in part.store])
            for group, part in state.pending_store.groups.items()
            if part.store
        ]

    def sweep(self) -> None:
        """Examine some of the stores: count idle ones, and drop those that lost a block."""
        for _ in range(min(STORES_EXAMINED_PER_STEP, len(self._published))):
            key, store = next(iter(self._published.items()))
            if not store.ends_intact:
                self._drop(store)
                continue
            self._count_idle(store, not store.held)
            self._published.move_to_end(key)

    def _count_idle(self, store: PublishedStore, idle: bool) -> None:
        self.idle += idle - store.counted_idle
        store.counted_idle = idle

    def _enter(self, key: ShareKey, groups: Mapping[int, PublishedGroup]) -> PublishedStore:
        self._made += 1
        self._unmade.pop(key, None)
        mark = BlockHash(MARK + b" %d" % self._made)
        stored = [(group, block) for group, part in groups.items() for block in part.store]
        # A group that did not evict keeps the blocks of the store before.
        self.drop_containing(b.block_id for _, b in stored if b.block_hash is None)
        if (former := self._published.get(key)) is not None:
            self._drop(former)
        tails = [(group, block) for group, part in groups.items() for block in part.tail]
        for group, block in stored + tails:
            if block.block_hash is None:
                block.set_block_hash(make_block_hash_with_group_id(mark, group))
        hashes = [(block, block.block_hash or b"") for _, block in stored + tails]
        store = self._published[key] = PublishedStore(key, groups, hashes)
        store.again = key.name in self._names
        self._names[key.name] = None
        self._names.move_to_end(key.name)
        if len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)
        self._retention.enter(store)
        return store

    def drop_containing(self, block_ids: Iterable[int]) -> None:
        """Drop the stores that contain one of these blocks, because survivors are written to them
        or because they were computed over blocks that could not be loaded."""
        for block_id in block_ids:
            for store in self._retention.owners(block_id):
                assert isinstance(store, PublishedStore)
                self._drop(store)

    def _drop(self, store: PublishedStore) -> None:
        """Drop a store; its remaining blocks, and those computed over it that are of no other
        store, become ordinary free memory."""
        if self._published.get(store.key) is store:
            del self._published[store.key]
            self._count_idle(store, False)
        self._retention.drop(store)
        own = {block.block_id for group in store.groups.values() for block in group.store}
        blocks = [(block, mark) for block, mark in store.hashes if block.block_id in own]
        blocks += (one for marked in store.suffix.values() for one in marked)
        # Stores of a chain share the blocks of groups that did not evict between them.
        blocks = [one for one in blocks if not self._retention.owners(one[0].block_id)]
        self.suffixes.drop(store)
        self._manager.block_pool.evict_blocks(
            {block.block_id for block, mark in blocks if block.block_hash == mark}
        )

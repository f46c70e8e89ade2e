"""The blocks of layers that attend within a window: sliding windows and chunks.

Such layers do not evict. A request that starts with a store computes nothing before its point, and
these layers then read their own tokens before it, as far as their window reaches. A store therefore
names the blocks of these tokens too, and is found only while all of them are there. What they hold
depends on earlier evictions, so vLLM's hash of the prefix would not do.

The window of a request that goes on leaves these blocks behind long before the request drops the
store. Requests that hold the store keep them as well, until their next eviction, or until running
requests need the memory.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)

from vllm_kvevict.engine.published import PublishedGroup, PublishedStore
from vllm_kvevict.rules.rule import blocks_for

if TYPE_CHECKING:
    from vllm_kvevict.engine.blocks import EvictionCore
    from vllm_kvevict.engine.request import RequestState


class Windows:
    """The KV-cache groups whose layers attend within a window.

    Args:
        core: The engine core.

    """

    def __init__(self, core: "EvictionCore") -> None:
        managers = core.cache.coordinator.single_type_managers
        self._core = core
        self._pool = core.cache.block_pool
        self.managers: dict[int, SingleTypeKVCacheManager] = {
            manager.kv_cache_group_id: manager
            for manager in managers
            if isinstance(manager, SlidingWindowManager | ChunkedLocalAttentionManager)
        }
        self.complete = len(core.managers) + len(self.managers) == len(managers)
        """False if a group neither evicts nor has a window. Full attention would need all tokens
        before the point, and recurrent layers their state at it, which vLLM does not keep."""
        self._keeping: dict[str, RequestState] = {}
        """Requests that keep blocks, in the order in which they began to."""

    def first_block(self, group: int, num_tokens: int) -> int:
        """Return the index of the first block that the token after ``num_tokens`` reads."""
        manager = self.managers[group]
        return manager.get_num_skipped_tokens(num_tokens) // manager.block_size

    def blocks_of(self, request_id: str, end: int) -> dict[int, PublishedGroup]:
        """Return the blocks that a token after ``end`` reads, by group.

        Args:
            request_id: A request with a step that ends at ``end``.
            end: Number of tokens.

        """
        groups = {}
        for group, manager in self.managers.items():
            first, size = self.first_block(group, end), manager.block_size
            blocks = manager.req_to_blocks[request_id][first : blocks_for(end, size)]
            groups[group] = PublishedGroup(first * size, (), tuple(blocks))
        return groups

    def keep(self, state: "RequestState", groups: Mapping[int, PublishedGroup]) -> None:
        """Let a request keep the blocks of these groups that have a window, all of which it or
        others hold."""
        self.let_go(state)
        state.kept_window = [block for group in self.managers for block in groups[group].tail]
        if state.kept_window:
            self._pool.touch(state.kept_window)
            self._keeping[state.request_id] = state

    def keep_of(self, state: "RequestState", store: PublishedStore) -> None:
        """Let a request keep the blocks of a store that have a window, if they are all there and
        running requests do not need them."""
        self.let_go(state)
        if not self.managers or not store.intact:
            return
        idle = sum(b.ref_cnt == 0 for group in self.managers for b in store.groups[group].tail)
        if not idle or idle <= self._core.free - self._next_step():
            self.keep(state, store.groups)

    def let_go(self, state: "RequestState", superseded: bool = False) -> None:
        """Return the blocks that a request keeps. They stay in the pool like cached blocks.

        Args:
            state: The request.
            superseded: True if a newer state of the request continues the one that they are of.

        """
        if self._keeping.pop(state.request_id, None) is not None:
            free = self._core.retention.free if superseded else self._pool.free_blocks
            free(state.take_window())

    def make_room(self, blocks: int | None = None) -> None:
        """Return blocks that are kept, until so many are free.

        Args:
            blocks: The number; None for what running requests may take in the next step.

        """
        if not self._keeping:
            return
        needed = self._next_step() if blocks is None else blocks
        for state in list(self._may_let_go()):
            if self._core.free >= needed:
                return
            self.let_go(state)

    def _may_let_go(self) -> "Iterator[RequestState]":
        """Yield the requests that keep blocks, and forget those that were preempted or ended.

        The blocks of a store whose tokens are not known yet are kept until it is published.
        """
        for request_id, state in list(self._keeping.items()):
            if not state.kept_window:
                del self._keeping[request_id]
            elif state.unpublished is None:
                yield state

    def _next_step(self) -> int:
        """Return the blocks that running requests may take in the next step."""
        scheduler = self._core.scheduler
        running = len(scheduler.running)
        tokens = sum(
            max(1, request.num_tokens - request.num_computed_tokens)
            for request in scheduler.running
        )
        tokens = min(tokens, scheduler.max_num_scheduled_tokens)
        sizes = self._core.cache.coordinator.group_block_sizes
        return sum(running + blocks_for(tokens, size) for size in sizes)

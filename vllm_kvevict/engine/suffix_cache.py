"""Blocks that requests compute between the point of a store and their next eviction."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_kvevict.engine.published import PublishedStore
from vllm_kvevict.stores.retention import MARK

if TYPE_CHECKING:
    from vllm_kvevict.engine.request import RequestState
    from vllm_kvevict.engine.windows import Windows

Suffix = list[tuple[KVCacheBlock | None, ...]]
"""Blocks of all groups, in the order of :attr:`SuffixCache.groups`, one tuple for each index; None
where the next token needs none."""


class SuffixCache:
    """Publishes the blocks that requests compute between the point of a store and their next
    eviction.

    Such a block depends on the store and on all tokens, which vLLM's hash of the block covers. A
    turn of a chat over one context therefore reuses the turns before it. A block is published when
    the whole step that computes it is scheduled, because vLLM may preempt a request in the step
    that admits it.

    A request may continue at the end of a block if all blocks of the groups that evict are there,
    and those of layers with a window as far as the window reaches.

    Args:
        hash_block_size: Tokens that one of vLLM's hashes covers.
        managers: The block managers of the KV-cache groups that evict.
        windows: The groups of layers with an attention window; None if the model has none.

    """

    def __init__(
        self,
        hash_block_size: int,
        managers: Mapping[int, SingleTypeKVCacheManager],
        windows: "Windows | None" = None,
    ) -> None:
        self._size = hash_block_size
        self._windows = windows
        windowed = dict(sorted(windows.managers.items())) if windows is not None else {}
        self._managers = dict(sorted(managers.items())) | windowed
        self.groups = list(self._managers)
        """The groups in the order in which entries list their blocks; those that evict first."""
        self._evicting = len(managers)
        self._enabled = all(manager.block_size == self._size for manager in self._managers.values())
        self._filled: list[tuple[RequestState, PublishedStore, int]] = []
        self._by_block: dict[int, tuple[PublishedStore, BlockHash]] = {}
        """Entries of all stores, by their block of the first group."""
        self._made = 0

    def note(self, state: "RequestState", num_tokens: int) -> None:
        """Record that the first ``num_tokens`` tokens of a request are computed, or about to be."""
        if state.base_store and num_tokens // self._size > state.suffix_published // self._size:
            self._filled.append((state, state.base_store, num_tokens))

    def publish(self) -> None:
        """Publish the recorded blocks of requests that still compute over the same store."""
        filled, self._filled = self._filled, []
        for state, store, num_tokens in filled:
            if state.holds_blocks and state.base_store is store and store.ends_intact:
                full = min(num_tokens // self._size, len(state.request.block_hashes))
                for index in range(state.suffix_published // self._size, full):
                    self._enter(store, state, index)
                state.suffix_published = max(state.suffix_published, full * self._size)

    def _enter(self, store: PublishedStore, state: "RequestState", index: int) -> None:
        key = state.request.block_hashes[index]
        known = self._intact(store, key)
        if not self._enabled or (known is not None and None not in known):
            return
        blocks = [m.req_to_blocks[state.request_id][index] for m in self._managers.values()]
        if known is not None and any(block.is_null for block in blocks):
            return
        self._made += 1
        mark = BlockHash(MARK + b", suffix %d" % self._made)
        marked = []
        for group, block in zip(self.groups, blocks, strict=True):
            # The block that contains the point belongs to the store. Blocks that a window has
            # passed were replaced by null blocks.
            if block.block_hash is None and not block.is_null:
                block.set_block_hash(make_block_hash_with_group_id(mark, group))
            marked.append((block, block.block_hash or b""))
        block_id = marked[0][0].block_id
        if (stale := self._by_block.get(block_id)) is not None:
            del stale[0].suffix[stale[1]]
        if (former := store.suffix.get(key)) is not None:
            # Published again: the former blocks now belong to other requests.
            del self._by_block[former[0][0].block_id]
        self._by_block[block_id] = store, key
        store.suffix[key] = marked

    def drop(self, store: PublishedStore) -> None:
        """Drop the blocks computed over a store that can no longer be found."""
        for marked in store.suffix.values():
            del self._by_block[marked[0][0].block_id]
        store.suffix.clear()

    def _intact(
        self, store: PublishedStore, key: BlockHash
    ) -> tuple[KVCacheBlock | None, ...] | None:
        """Return the blocks of an entry, with None for those of windows that were reused; None if
        one of the groups that evict was reused, or if there is no entry."""
        blocks = store.suffix_blocks(key)
        return None if blocks is None or None in blocks[: self._evicting] else blocks

    def find(self, state: "RequestState", store: PublishedStore, limit: int) -> tuple[Suffix, int]:
        """Return the blocks that continue a store for a request, up to ``limit`` tokens.

        Returns:
            The blocks of all groups, including the one that contains the point, and the number of
            tokens up to their end; no blocks and the point if the first is missing.

        """
        suffix: Suffix = []
        point = store.key.point
        first, last = point // self._size, 0
        # Index from which all blocks of a group with a window are there.
        since = {group: store.groups[group].tail_start // self._size for group in self._windowed}
        for index, key in enumerate(state.request.block_hashes[first : limit // self._size], first):
            blocks = self._intact(store, key)
            if blocks is None:
                break
            suffix.append(blocks)
            for group, block in zip(self._windowed, blocks[self._evicting :], strict=True):
                since[group] = index + 1 if block is None else since[group]
            if self._reaches(since, (index + 1) * self._size):
                last = len(suffix)
        del suffix[last:]
        return suffix, (first + last) * self._size if suffix else point

    @property
    def _windowed(self) -> list[int]:
        return self.groups[self._evicting :]

    def _reaches(self, since: Mapping[int, int], num_tokens: int) -> bool:
        """Return whether the blocks from these indices on are all that the token after
        ``num_tokens`` reads."""
        if self._windows is None:
            return True
        return all(self._windows.first_block(g, num_tokens) >= i for g, i in since.items())

"""Blocks that were computed over a published store, for requests that go on as others did."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.engine.shared_store import SharedStore

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Behind:
    """Publishes what requests compute between a store's point and their next eviction.

    It depends on the store and on all tokens, which vLLM's hash of a block covers. A turn of a chat
    over one context so takes the turns before it. Published when the step that computes a block is
    scheduled as a whole: vLLM may preempt a request in the step that let it in.

    Args:
        hash_block_size: Tokens that one of vLLM's hashes covers.
        managers: The block managers that evict, by KV-cache group: all there are.

    """

    def __init__(
        self, hash_block_size: int, managers: Mapping[int, EvictableAttentionManager]
    ) -> None:
        self._size = hash_block_size
        self._managers = dict(sorted(managers.items()))
        self._enabled = all(one.block_size == self._size for one in managers.values())
        self._filled: list[tuple[Request, Entry, int]] = []
        self._by_block: dict[int, tuple[SharedStore, BlockHash]] = {}
        self._made = 0

    def note(self, request: "Request", entry: Entry, num_tokens: int) -> None:
        """Note that a request's first ``num_tokens`` tokens are computed, or are about to be."""
        if entry.shared is not None and num_tokens // self._size > entry.behind // self._size:
            self._filled.append((request, entry, num_tokens))

    def publish(self, entries: Mapping[str, Entry]) -> None:
        """Let others take what was noted of requests that are still admitted."""
        filled, self._filled = self._filled, []
        for request, entry, num_tokens in filled:
            if entries.get(request.request_id) is entry and entry.shared is not None:
                full = min(num_tokens // self._size, len(request.block_hashes))
                for index in range(entry.behind // self._size, full):
                    self._enter(entry.shared, request, index)
                entry.behind = max(entry.behind, full * self._size)

    def _enter(self, shared: SharedStore, request: "Request", index: int) -> None:
        key = request.block_hashes[index]
        if not self._enabled or shared.found_behind(key) is not None:
            return
        self._made += 1
        mark = BlockHash(b"kv_eviction store, behind %d" % self._made)
        marked = []
        for group, manager in self._managers.items():
            block = manager.req_to_blocks[request.request_id][index]
            # The block that the point cuts belongs to the store.
            if block.block_hash is None:
                block.set_block_hash(make_block_hash_with_group_id(mark, group))
            marked.append((block, block.block_hash or b""))
        first = marked[0][0].block_id
        if (stale := self._by_block.pop(first, None)) is not None:
            stale[0].behind.pop(stale[1], None)
        self._by_block[first] = shared, key
        shared.behind[key] = marked

    def find(
        self, request: "Request", shared: SharedStore, most: int
    ) -> tuple[list[tuple[KVCacheBlock, ...]], int]:
        """What continues a store as a request does, up to ``most`` tokens.

        Returns:
            Blocks of all groups, the one that the point cuts included, and the tokens up to their
            end; none of them, and the point, where the first is not there.

        """
        found: list[tuple[KVCacheBlock, ...]] = []
        point = shared.key.point
        first = point // self._size
        for key in request.block_hashes[first : most // self._size]:
            blocks = shared.found_behind(key)
            if blocks is None:
                break
            found.append(blocks)
        return found, (first + len(found)) * self._size if found else point

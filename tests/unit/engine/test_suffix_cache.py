"""What is computed over a store, with vLLM's blocks and no pool: reused, ended, and forgotten."""

import weakref
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)

from vllm_kvevict.engine.published import PublishedGroup, PublishedStore
from vllm_kvevict.engine.request import Phase
from vllm_kvevict.engine.suffix_cache import SuffixCache
from vllm_kvevict.stores.key import ShareKey

SIZE, POINT = 16, 40
"""The point cuts the third block, which belongs to the store."""


def store() -> PublishedStore:
    return PublishedStore(ShareKey(b"", (), None, POINT, "snapkv", 0, ((0, 1),)), {}, [])


class Requests:
    """Requests of one group, whose blocks the test names by id."""

    def __init__(self) -> None:
        self.blocks = [KVCacheBlock(number) for number in range(32)]
        self.manager = SimpleNamespace(block_size=SIZE, req_to_blocks={})
        self.cache = SuffixCache(SIZE, {0: self.manager})  # type: ignore[dict-item]

    def new(
        self, name: str, keys: list[bytes], ids: list[int], over: PublishedStore | None = None
    ) -> Any:
        self.manager.req_to_blocks[name] = [self.blocks[number] for number in ids]
        hashes = [BlockHash(key) for key in keys]
        return SimpleNamespace(
            request_id=name,
            request=SimpleNamespace(request_id=name, block_hashes=hashes),
            phase=Phase.PREFILL,
            holds_blocks=True,
            base_store=over,
            suffix_published=POINT,
        )

    def publish(self, state: Any, blocks: int) -> None:
        self.cache.note(state, blocks * SIZE)
        self.cache.publish()


def test_the_longest_run_of_equal_blocks_is_reused() -> None:
    requests, shared = Requests(), store()
    maker = requests.new("maker", [b"0", b"1", b"2", b"3", b"4"], [1, 2, 3, 4, 5], shared)
    requests.publish(maker, 5)
    assert maker.suffix_published == 5 * SIZE
    other = requests.new("other", [b"0", b"1", b"2", b"3", b"x"], [])
    found, end = requests.cache.find(other, shared, 5 * SIZE)
    assert ([[block.block_id for block in each] for each in found], end) == ([[3], [4]], 4 * SIZE)
    assert requests.cache.find(other, shared, 3 * SIZE + 1)[1] == 3 * SIZE, "whole blocks only"
    stranger = requests.new("stranger", [b"0", b"1", b"y"], [])
    assert requests.cache.find(stranger, shared, 5 * SIZE) == ([], POINT)
    assert requests.cache.find(other, store(), 5 * SIZE) == ([], POINT), "of that store only"


def test_a_request_that_left_or_evicted_publishes_nothing() -> None:
    requests, shared = Requests(), store()
    keys = [b"0", b"1", b"2", b"3"]
    left, again, evicted = (
        requests.new(name, keys, [1, 2, 3, 4], shared) for name in ("left", "again", "evicted")
    )
    for state in (left, again, evicted):
        requests.cache.note(state, 4 * SIZE)
    left.holds_blocks = False
    again.base_store = store()
    evicted.base_store = None
    requests.cache.publish()
    assert not shared.suffix and not again.base_store.suffix


def test_a_block_that_serves_others_by_then_is_neither_found_nor_remembered() -> None:
    """Whatever the pool hands out again, no more entries stay than there are blocks."""
    requests, shared = Requests(), store()
    for turn in range(20):
        keys = [b"0", b"1", b"2 of %d" % turn]
        requests.publish(requests.new(f"r{turn}", keys, [1, 2, 3], shared), 3)
        assert list(shared.suffix) == [keys[2]]
        asker = requests.new("asker", keys, [])
        assert requests.cache.find(asker, shared, 3 * SIZE)[1] == 3 * SIZE
        # As vLLM's pool does when it hands a block out.
        requests.blocks[3].reset_hash()
        assert requests.cache.find(asker, shared, 3 * SIZE) == ([], POINT)


def test_what_was_published_again_elsewhere_outlives_its_first_block() -> None:
    """Its first block serves other content later; the entry is in other blocks since."""
    requests, shared = Requests(), store()
    mine, others = [b"0", b"1", b"mine"], [b"0", b"1", b"others"]
    requests.publish(requests.new("a", mine, [1, 2, 3], shared), 3)
    requests.blocks[3].reset_hash()
    requests.publish(requests.new("b", mine, [1, 2, 7], shared), 3)
    requests.publish(requests.new("c", others, [1, 2, 3], shared), 3)
    for keys, block in ((mine, 7), (others, 3)):
        found, end = requests.cache.find(requests.new("asker", keys, []), shared, 3 * SIZE)
        assert ([each[0].block_id for each in found], end) == ([block], 3 * SIZE)


def test_nothing_is_kept_of_a_store_that_was_dropped() -> None:
    """Stores are large, and the engine lives for days: blocks may never serve a suffix again."""
    requests = Requests()
    gone = []
    for turn in range(8):
        shared, first = store(), 3 * turn
        keys = [b"0", b"1", b"2 of %d" % turn, b"3 of %d" % turn]
        requests.publish(requests.new("a", keys, [1, 2, first + 3, first + 4], shared), 4)
        # Published again in another block since: the first one is no longer its.
        requests.blocks[first + 3].reset_hash()
        requests.publish(requests.new("b", keys, [1, 2, first + 5, first + 4], shared), 4)
        requests.cache.drop(shared)
        assert not shared.suffix
        gone.append(weakref.ref(shared))
    del shared
    assert [one() for one in gone] == [None] * 8


def test_nothing_is_published_over_a_store_that_lost_a_block() -> None:
    requests = Requests()
    block = requests.blocks[9]
    block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"store"), 0))
    groups = {0: PublishedGroup(32, (block,), ())}
    shared = PublishedStore(store().key, groups, [(block, block.block_hash or b"")])
    keys = [b"0", b"1", b"2", b"3"]
    requests.publish(requests.new("a", keys, [1, 2, 3, 4], shared), 3)
    assert list(shared.suffix) == [b"2"]
    block.reset_hash()
    requests.publish(requests.new("b", keys, [1, 2, 5, 6], shared), 4)
    assert list(shared.suffix) == [b"2"]

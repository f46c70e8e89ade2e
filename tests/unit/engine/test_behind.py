"""What lies behind a store, with vLLM's blocks and no pool: taken, ended, and forgotten."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from vllm_kvevict.engine.behind import Behind
from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.shared_store import SharedStore, ShareKey

SIZE, POINT = 16, 40
"""The point cuts the third block, which belongs to the store."""


def store() -> SharedStore:
    return SharedStore(ShareKey(b"", (), None, POINT, "snapkv", 0, ((0, 1),)), {}, [])


def entry(shared: SharedStore | None) -> Entry:
    return Entry({}, "snapkv", True, shared=shared, behind=POINT)


class Requests:
    """Requests of one group, whose blocks the test names by id."""

    def __init__(self) -> None:
        self.blocks = [KVCacheBlock(number) for number in range(32)]
        self.manager = SimpleNamespace(block_size=SIZE, req_to_blocks={})
        self.behind = Behind(SIZE, {0: self.manager})  # type: ignore[dict-item]

    def new(self, name: str, keys: list[bytes], ids: list[int]) -> Any:
        self.manager.req_to_blocks[name] = [self.blocks[number] for number in ids]
        return SimpleNamespace(request_id=name, block_hashes=[BlockHash(key) for key in keys])


def test_the_longest_run_of_equal_blocks_is_taken() -> None:
    requests, shared = Requests(), store()
    maker = requests.new("maker", [b"0", b"1", b"2", b"3", b"4"], [1, 2, 3, 4, 5])
    mine = entry(shared)
    requests.behind.note(maker, mine, 5 * SIZE)
    requests.behind.publish({"maker": mine})
    assert mine.behind == 5 * SIZE
    other = requests.new("other", [b"0", b"1", b"2", b"3", b"x"], [])
    found, end = requests.behind.find(other, shared, 5 * SIZE)
    assert ([[block.block_id for block in each] for each in found], end) == ([[3], [4]], 4 * SIZE)
    assert requests.behind.find(other, shared, 3 * SIZE + 1)[1] == 3 * SIZE, "whole blocks only"
    stranger = requests.new("stranger", [b"0", b"1", b"y"], [])
    assert requests.behind.find(stranger, shared, 5 * SIZE) == ([], POINT)
    assert requests.behind.find(other, store(), 5 * SIZE) == ([], POINT), "of that store only"


def test_a_request_that_left_or_evicted_publishes_nothing() -> None:
    requests, shared = Requests(), store()
    keys = [b"0", b"1", b"2", b"3"]
    left, again, evicted = (entry(shared) for _ in range(3))
    for name, noted in (("left", left), ("again", again), ("evicted", evicted)):
        requests.behind.note(requests.new(name, keys, [1, 2, 3, 4]), noted, 4 * SIZE)
    evicted.shared = None
    requests.behind.publish({"again": entry(shared), "evicted": evicted})
    assert not shared.behind


def test_a_block_that_serves_others_by_then_is_neither_found_nor_remembered() -> None:
    """Whatever the pool hands out again, no more entries stay than there are blocks."""
    requests, shared = Requests(), store()
    for turn in range(20):
        keys = [b"0", b"1", b"2 of %d" % turn]
        mine = entry(shared)
        requests.behind.note(requests.new(f"r{turn}", keys, [1, 2, 3]), mine, 3 * SIZE)
        requests.behind.publish({f"r{turn}": mine})
        assert list(shared.behind) == [keys[2]]
        taker = requests.new("taker", keys, [])
        assert requests.behind.find(taker, shared, 3 * SIZE)[1] == 3 * SIZE
        # As vLLM's pool does when it hands a block out.
        requests.blocks[3].reset_hash()
        assert requests.behind.find(taker, shared, 3 * SIZE) == ([], POINT)

"""A router that replays published KV-cache events knows what prefix cache and host memory have."""

import time

import pytest
import zmq
from msgspec.msgpack import Decoder
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx

from tests.e2e.test_offload import DOCUMENT, OPTIONS, PROMPTS, SETTINGS
from tests.e2e.test_stores import lose
from tests.engine.announced import Announced
from tests.models import random_prompt
from tests.nightly import some
from tests.oracles.engine import engine

CPU = "CPU"
CASES = {
    "offload": (SETTINGS, {}),
    "stores": (SETTINGS | dict(store_memory="1G"), dict(kv_offloading_size=None)),
    "both, evicts shared": (SETTINGS | dict(store_memory="1G", shared_blocks="evict"), {}),
}


def named(key: bytes) -> tuple:
    """How events name a chunk of host memory."""
    return maybe_convert_block_hash(get_offload_block_hash(key)), get_offload_group_idx(key)


class Subscriber:
    """Takes the batches that a server publishes."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        time.sleep(1)  # Until the subscription has arrived.
        self._next = 0

    def events(self) -> list:
        """All that came until nothing has come for half a second, none of it lost."""
        found = []
        while self._socket.poll(500):
            _, number, payload = self._socket.recv_multipart()
            assert int.from_bytes(number, "big") == self._next, "a batch was lost"
            self._next += 1
            found += Decoder(KVEventBatch).decode(payload).events
        return found

    def close(self) -> None:
        self._socket.close(0)


@pytest.mark.parametrize("case", some(CASES, "both, evicts shared"))
def test_a_replay_is_what_is_there(tiny_model, tmp_path, case):
    settings, options = CASES[case]
    published = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/events")
    options = OPTIONS | options | dict(num_gpu_blocks_override=60, kv_events_config=published)
    point, in_memory, loaded = {"kv_eviction_at": 490}, set(), 0
    if options["kv_offloading_size"]:
        options["kv_offloading_size"] = 0.002
    with engine(tiny_model, settings, **options) as run:
        subscriber = Subscriber(published.endpoint)
        try:
            pool = run.scheduler.kv_cache_manager.block_pool
            announced = Announced(pool, published=True)
            turns = [(PROMPTS, {}), (PROMPTS, point), ([random_prompt(700, seed=9)] * 2, {})]
            for number, (prompts, asked) in enumerate([*turns, *turns]):
                if number == 4:
                    lose(run)
                run.generate([*prompts, DOCUMENT], 40, [asked] * (len(prompts) + 1))
                events = subscriber.events()
                for event in events:
                    if getattr(event, "medium", None) == CPU:
                        hashes = {(one, event.group_idx) for one in event.block_hashes}
                        stored = type(event).__name__ == "BlockStored"
                        in_memory = in_memory | hashes if stored else in_memory - hashes
                        loaded += stored
                announced.replay([one for one in events if getattr(one, "medium", None) != CPU])
                announced.check()
            assert run.counters.evictions_prefill and run.counters.evictions_decode
            assert run.counters.stores_published
            if run.scheduler.connector is not None:
                chunks = run.scheduler.connector.scheduler.manager._policy.chunks
                assert in_memory == {named(key) for key, one in chunks.items() if one.is_ready}
                assert loaded > len(chunks) > 0, "nothing has left host memory"
        finally:
            subscriber.close()

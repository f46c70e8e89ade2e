"""Stores that were there and not found.

Blocks of 8, window 8, budget 40, an eviction point at 100, as in ``test_sharing``.
"""

import gc
from concurrent.futures import Future
from dataclasses import replace
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest

from tests.engine.cases import BOTH, SYNC, counters, engine, hit, lose, tokens
from vllm_kvevict.engine import stores as engine_stores
from vllm_kvevict.engine.published import PublishedStore
from vllm_kvevict.engine.store_reads import MAX_STORES_READ, Lookup
from vllm_kvevict.stores.region import Region

ONCE = {"kv_eviction_at": 100, "kv_eviction_interval": 0}


@BOTH
def test_a_turn_that_was_computed_again_is_found(setup):
    """A user's conversation about a document is computed anew at every turn, on a busy server.

    The blocks of its last turn were lost, computed again and published again. When the pool handed
    the lost ones to another conversation, what was published last was forgotten with them.
    """
    core = engine(replace(setup, blocks=64, max_batched=512))
    document, turn = tokens(100), tokens(45, 1)

    def say(more, max_tokens):
        request = core.add(document + more, max_tokens, asked=ONCE)
        return request, core.step()

    say(turn, 4)
    core.finish()
    assert counters(core).stores_published == 1
    # Blocks leave in the order in which they were freed: the turn's first, the store's last.
    core.hold(free=4 + 2)
    core.release()
    again, output = say(turn, 200)
    assert hit(output, again) == 104, "the turn is lost; the store, and the block it cuts, is there"
    for index in range(12):
        other, output = say(tokens(45, 50 + index), 2)
        assert hit(output, other) == 100, "it says something else"
        while not other.is_finished():
            core.step()
    repeated, output = say(turn, 2)
    assert hit(output, repeated) == 144, "the last turn is in the cache, whole"
    core.finish()


@BOTH
def test_two_stores_of_one_step_and_memory_for_one(setup):
    """The second pushed out the first before it was saved: workers kept it for ever."""
    core = engine(replace(setup, memory=2 * 8 * 1000 * 1000, max_batched=512))
    stores = core.scheduler._stores
    core.add(tokens(120), 4, asked=ONCE)
    core.finish()
    num_bytes = stores.kept_bytes
    stores._memory = num_bytes + 1
    for seed in (1, 2):
        core.add(tokens(120, seed), 4, asked=ONCE)
    core.finish()
    assert counters(core).stores_published == 3
    assert len(core.worker.host) == 1 and stores.kept_bytes == num_bytes
    assert counters(core).stores_saved == 2, "the first alone, then one of the two"


def test_stores_that_are_lost_are_forgotten_without_statistics():
    """The memory of a server with --disable-log-stats grew with every document."""
    core = engine(replace(SYNC, max_batched=512))
    for seed in range(60):
        core.add(tokens(130, seed), 2, asked=ONCE)
        core.finish()
    stores = core.scheduler._stores
    assert len(stores._published) < core.setup.blocks // 4


def test_stores_are_forgotten_where_a_step_makes_more_than_it_examines(monkeypatch):
    """Stores that were dropped before a step examined them must not stay in memory."""
    monkeypatch.setattr(engine_stores, "STORES_EXAMINED_PER_STEP", 1)
    core = engine(replace(SYNC, every=32, max_num_seqs=16, max_batched=2048, blocks=300))
    for seed in range(60):
        core.add(tokens(200, seed), 2)
    core.finish()
    gc.collect()
    left = sum(isinstance(one, PublishedStore) for one in gc.get_objects())
    assert counters(core).stores_published > 200 > 100 > left


@BOTH
@pytest.mark.parametrize("memory", [0, 10**9])
def test_nobody_waits_for_a_store_that_is_there(setup, memory):
    """A question about a document waited until it was computed for a request with prompt_logprobs.

    That computes all of its prompt, and comes to the point of a store that it does not take.
    """
    core = engine(replace(setup, long_prefill=16, blocks=90, memory=memory))
    core.add(tokens(130), 4, asked=ONCE)
    core.finish()
    whole = core.add(tokens(130), 4, asked=ONCE)
    whole.skip_reading_prefix_cache = True
    core.step()
    other = core.add(tokens(106), 4, asked=ONCE)
    assert hit(core.step(), other) == 104 and whole.num_computed_tokens < 100
    core.finish()


def read(stores: Any, name: str) -> None:
    """Its file was read."""
    lookup = stores.reads.reading[name] = Lookup(Mock(), {}, 1, monotonic() + 10)
    lookup.future.set_result([Region(1)])


@BOTH
def test_a_store_that_leaves_memory_and_comes_back_in_one_step(setup):
    """Workers load first and forget then: the next request for it ended the engine."""
    core = engine(replace(setup, blocks=90, memory=10**9, max_batched=512))
    stores, names, copies = core.scheduler._stores, [], []
    for seed in (1, 2):
        core.add(tokens(130, seed), 4, asked=ONCE)
        core.finish()
        names.append(next(iter(stores._kept)))
        copies.append(core.worker.host[names[-1]])
        stores._memory = stores.kept_bytes + 1
    assert names[0] != names[1] and len(stores._kept) == 1
    lose(core)
    core.worker.host[names[0]] = copies[0]  # What its file holds.
    for seed, name in enumerate(names, 1):
        read(stores, name)
        core.add(tokens(130, seed), 4, asked=ONCE)
    core.finish()
    lose(core)
    core.add(tokens(130, 2), 4, asked=ONCE)
    core.finish()
    assert counters(core).stores_restored_memory == 1


@BOTH
def test_what_was_read_is_dropped_when_nobody_waits_for_it(setup):
    """Eight requests whose clients went away kept all others from files, as long as it was idle."""
    core = engine(replace(setup, blocks=90, memory=10**9, max_batched=512))
    stores: Any = core.scheduler._stores
    stores.reads.files, stores.reads.threads = object(), Mock(submit=lambda *_: Future())
    asked = [core.add(tokens(130, seed), 4, asked=ONCE) for seed in (*range(MAX_STORES_READ), 0)]
    core.step()
    assert len(stores.reads.reading) == MAX_STORES_READ
    for request in asked[:-1]:
        core.abort(request)
    name = core.scheduler._table.states[asked[-1].request_id].store_key.name
    assert stores.reads.reading.keys() == {name}, "somebody waits for it"
    whole = core.add(tokens(130), 4, asked=ONCE)
    whole.skip_reading_prefix_cache = True
    stores.reads.files = None
    core.step()
    core.settle()
    assert not stores.reads.reading, "it was computed"
    core.finish()
    assert counters(core).stores_reused == 1


@BOTH
def test_a_reset_leaves_no_idle_store(setup):
    """The metric kept its value, and then fell by sixteen in each step."""
    core = engine(replace(setup, blocks=900, max_batched=512))
    for seed in range(40):
        core.add(tokens(130, seed), 2, asked={"kv_eviction_at": 100})
        core.finish()
    stores = core.scheduler._stores
    assert stores.idle > 20
    core.reset()
    assert stores.idle == 0
    core.add(tokens(130), 2, asked={"kv_eviction_at": 100})
    core.finish()
    assert counters(core).stores_reused == 0

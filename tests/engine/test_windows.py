"""Stores of servers with layers that attend within a window, which do not evict.

Setup as in ``test_sharing``: blocks of 8, budget 40, a point at 100. The window has 20 tokens, or a
chunk 16. What the shadow worker reads of it was computed for these very tokens over that store.
"""

from dataclasses import replace

import pytest

from tests.engine.cases import (
    ASYNC,
    BOTH,
    SYNC,
    counters,
    engine,
    evictions,
    hit,
    lose,
    tokens,
    used_blocks,
)
from tests.engine.harness import Engine, Setup
from tests.engine.test_chains import conversations, reused_at, say
from tests.engine.test_sharing import DOCUMENT, ask, idle, run_first
from tests.nightly import covering

WINDOWS = {
    "5 tokens": dict(sliding_window=5),
    "20 tokens": dict(sliding_window=20),
    "more than the document": dict(sliding_window=300),
    "chunks": dict(sliding_window=16, chunked=True),
}
EACH = pytest.mark.parametrize(
    "setup, window",
    covering(
        [pytest.param(SYNC, id="sync"), pytest.param(ASYNC, id="async")],
        [pytest.param(window, id=name) for name, window in WINDOWS.items()],
    ),
)


def serving(setup: Setup, **changes) -> Engine:
    options = dict(sliding_window=20, max_batched=512, blocks=160)
    return engine(replace(setup, **(options | changes)))


def pool(core: Engine):
    return core.scheduler.kv_cache_manager.block_pool


def kept(core: Engine, request) -> list[int]:
    """Ids of the blocks that a request keeps for the window of its store."""
    return [
        block.block_id for block in core.scheduler._table.states[request.request_id].kept_window
    ]


@EACH
@pytest.mark.parametrize("steps", [1, 60], ids=["at once", "after the window has moved on"])
@pytest.mark.parametrize("point", [100, 104])
def test_a_second_request_computes_only_what_follows_the_point(setup, window, steps, point):
    core = serving(setup, **window)
    asked = {"kv_eviction_at": point}
    core.add(tokens(130), 200, asked=asked)
    for _ in range(steps):
        core.step()
    second = core.add(tokens(point) + tokens(30, 2), 20, asked=asked)
    output = core.step()
    assert hit(output, second) == point and output.num_scheduled_tokens[second.request_id] == 30
    assert counters(core).stores_reused == 1 and counters(core).tokens_reused == point
    core.finish()
    assert counters(core).evictions_prefill == 1 and core.invariants.tally.taken == 1


@BOTH
def test_two_evicting_groups_and_a_window(setup):
    core = serving(setup, second_budget=80)
    run_first(core)
    second = ask(core, 2)
    assert hit(core.step(), second) == 100
    core.finish()


@BOTH
def test_a_store_whose_window_was_taken_by_others_is_computed(setup):
    """The window's blocks are those of other requests by then; what is kept is still there."""
    core = serving(setup)
    run_first(core)
    (store,) = core.scheduler._stores._published.values()
    core.abort(core.requests[0])
    core.settle()
    pool(core).evict_blocks({store.groups[1].tail[0].block_id})
    assert all(block.block_hash for block in store.groups[0].store)
    second = ask(core, 2)
    assert hit(core.step(), second) <= 96
    core.finish()
    assert counters(core).stores_reused == 0 and counters(core).stores_published == 2


@BOTH
def test_an_idle_store_leaves_with_its_window(setup):
    core = serving(setup)
    core.abort(run_first(core))
    core.settle()
    assert idle(core.scheduler._stores) == 1 and used_blocks(core) == 0
    (store,) = core.scheduler._stores._published.values()
    assert len(store.groups[1].tail) == 3
    # The pool hands out what was used least recently; the store was used last.
    core.hold(len(store.hashes))
    core.release()
    assert store.intact
    second = ask(core, 3)
    assert hit(core.step(), second) == 100
    core.finish()


@BOTH
def test_a_request_keeps_the_window_of_its_store_while_it_goes_on(setup):
    core = serving(setup)
    first = run_first(core)
    for _ in range(25):
        core.step()
    (store,) = core.scheduler._stores._published.values()
    assert kept(core, first) == [block.block_id for block in store.groups[1].tail]
    core.hold(30)
    core.release()
    second = ask(core, 2)
    assert hit(core.step(), second) == 100
    assert kept(core, second) == kept(core, first)
    core.abort(first)
    core.settle()
    assert all(block.ref_cnt for block in store.groups[1].tail)
    core.finish()


@BOTH
def test_the_window_is_returned_with_the_next_eviction(setup):
    core = serving(setup)
    first = run_first(core)
    assert kept(core, first)
    while not evictions(core.step()):
        pass
    assert not kept(core, first)
    core.finish()


@BOTH
def test_a_window_that_is_kept_preempts_nobody(setup):
    """All else is taken: the request goes on in the blocks that it kept."""
    core = serving(setup)
    first = run_first(core)
    for _ in range(10):
        core.step()
    assert len(kept(core, first)) == 3
    core.hold(0)
    for _ in range(8):
        core.step()
    assert not first.num_preemptions and not kept(core, first)
    core.release()
    core.finish()


@BOTH
def test_a_prompt_that_fills_the_pool_is_admitted_beside_its_store(setup):
    """Alone it holds what vLLM admits at most; the window that it keeps must not be in its way."""
    core = serving(setup, blocks=45, max_batched=64)
    for seed in range(3):
        core.add(DOCUMENT + tokens(60, seed), 15, asked={"kv_eviction_at": 100})
        core.finish()
    assert counters(core).stores_reused >= 1


@EACH
@pytest.mark.parametrize("point", [100, 104])
def test_a_turn_takes_what_the_one_before_computed(setup, window, point):
    core = serving(setup, **window)
    asked = {"kv_eviction_at": point, "kv_eviction_interval": 0}
    first = core.add(tokens(point) + tokens(30, 1), 60, asked=asked)
    core.finish()
    computed = first.num_tokens - 1
    second = core.add([*first.all_token_ids, *tokens(30, 7)], 20, asked=asked)
    assert hit(core.step(), second) == computed // 8 * 8 > point
    third = core.add(tokens(point) + tokens(30, 2) + tokens(60, 3), 20, asked=asked)
    assert hit(core.step(), third) == point, "it asked something else"
    core.finish()
    fourth = core.add([*second.all_token_ids, *tokens(5, 7)], 20, asked=asked)
    assert hit(core.step(), fourth) == (second.num_tokens - 1) // 8 * 8
    core.finish()
    assert core.invariants.tally.taken_behind == 2 and counters(core).evictions_prefill == 1


@BOTH
def test_a_turn_continues_where_its_window_is_whole(setup):
    """Of what was computed after the store, the window has lost a block."""
    core = serving(setup)
    asked = {"kv_eviction_at": 100, "kv_eviction_interval": 0}
    first = core.add(DOCUMENT + tokens(30, 1), 60, asked=asked)
    core.finish()
    (store,) = core.scheduler._stores._published.values()
    entries = [store.suffix[key] for key in first.block_hashes[12:23]]
    # The one of the tokens from 168 on, of a window that begins at 165 where it ends at 184.
    gone, _ = entries[21 - 12][1]
    pool(core).evict_blocks({gone.block_id})
    second = core.add([*first.all_token_ids, *tokens(30, 7)], 40, asked=asked)
    assert hit(core.step(), second) == 168
    core.finish()
    third = core.add([*first.all_token_ids, *tokens(30, 7), *tokens(9, 8)], 4, asked=asked)
    assert hit(core.step(), third) == 216, "what was computed again is there"
    core.finish()


@BOTH
@pytest.mark.parametrize("chunk", [7, 40])
def test_requests_wait_for_the_one_that_makes_their_store(setup, chunk):
    core = serving(setup, max_batched=chunk)
    _, *others = [ask(core, seed) for seed in range(4)]
    core.finish()
    assert counters(core).stores_reused == len(others)
    assert counters(core).evictions_prefill == 1


@BOTH
def test_a_preempted_request_takes_the_store_again(setup):
    core = serving(setup)
    run_first(core)
    second = ask(core, 2, 100)
    for _ in range(6):
        core.step()
    core.hold(0)
    for _ in range(20):
        core.step()
        core.hold(0)
    assert second.num_preemptions
    core.release()
    core.finish()
    assert core.invariants.tally.taken_again == 1


@BOTH
def test_a_reset_forgets_stores(setup):
    core = serving(setup)
    run_first(core)
    core.reset()
    core.finish()
    assert counters(core).stores_reused == 0 and counters(core).stores_published == 2


@EACH
def test_a_turn_of_a_conversation_computes_only_what_is_new(setup, window):
    core = conversations(setup, **window)
    former = core.add(tokens(150), 60)
    core.finish()
    for turn in range(5):
        former, before = say(core, former, 30), former.num_tokens
        computed = before - hit(core.step(), former)
        # The last token was never computed, and the window of the next eviction is computed anew.
        assert computed <= 8 + 1 + 8 + 8, turn
        core.finish()
    assert counters(core).stores_reused == 5 and core.invariants.tally.taken_later == 5


@BOTH
def test_a_conversation_starts_with_the_deepest_store_whose_window_is_left(setup):
    core = conversations(setup, sliding_window=20)
    former = core.add(tokens(150), 60)
    core.finish()
    assert reused_at(core) == [72, 104, 136, 168, 200]
    published = core.scheduler._stores._published
    for last in (200, 168):
        gone = [store for key, store in published.items() if key.point >= last]
        pool(core).evict_blocks({store.groups[1].tail[-1].block_id for store in gone})
        second = say(core, former, 30, 4)
        assert last - 32 <= hit(core.step(), second) < last
        core.abort(second)
        core.settle()


@BOTH
def test_branches_of_a_conversation_that_was_lost(setup):
    core = conversations(setup, sliding_window=20, blocks=400, max_num_seqs=16)
    former = core.add(tokens(200), 40)
    core.finish()
    lose(core)
    for seed in range(12):
        say(core, former, 20, 2, seed=seed)
    core.finish()
    # The first one computes what they have in common, and the others wait for it.
    assert counters(core).stores_reused == 11


@EACH
@pytest.mark.parametrize("point", [100, 104])
def test_a_store_comes_back_from_host_memory_with_its_window(setup, window, point):
    core = serving(setup, **window, memory=10**9)
    asked = {"kv_eviction_at": point, "kv_eviction_interval": 0}
    core.add(tokens(point) + tokens(30, 1), 60, asked=asked)
    core.finish()
    assert counters(core).stores_saved == 1
    lose(core)
    second = core.add(tokens(point) + tokens(30, 2), 20, asked=asked)
    assert hit(core.step(), second) == point
    core.finish()
    assert counters(core).stores_restored_memory == counters(core).stores_reused == 1


@BOTH
def test_a_turn_is_saved_with_its_window_where_memory_is_short(setup):
    """The window of the last store is kept while the answer goes on and others take what is
    free."""
    core = conversations(setup, sliding_window=20, memory=10**9)
    former = core.add(tokens(150), 78)
    while former.num_tokens < 160:
        core.step()
    while not former.is_finished():
        # Running requests need a few blocks a step.
        free = pool(core).get_num_free_blocks()
        core.hold(min(16, free))
        core.step()
        core.release()
    core.finish()
    assert counters(core).stores_saved == 2, "the last ones of the prompt and of the answer"
    lose(core)
    second = say(core, former, 20, 4)
    assert hit(core.step(), second) == 200
    core.finish()
    assert counters(core).stores_restored_memory == 1

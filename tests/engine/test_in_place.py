"""Evictions without fresh blocks, and evictions of requests that share a prefix.

Blocks of 8, window 8, budget 40: a store of 4 blocks, as in ``test_scheduler``.
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
    tokens,
    used_blocks,
)
from vllm_kvevict.engine.memory_pressure import Forecast
from vllm_kvevict.rules.step_plan import PLAN

ROOMY = replace(SYNC, max_batched=512)


def parts(output):
    """Every group's eviction in a plan."""
    plan = getattr(output, PLAN, None)
    return [part for each in plan.evictions for part in each.groups] if plan else []


def published(core, ids):
    pool = core.scheduler.kv_cache_manager.block_pool
    return [pool.blocks[i].block_hash is not None for i in ids]


@BOTH
def test_a_prompt_that_fills_the_pool_evicts_at_its_end(setup):
    core = engine(replace(setup, blocks=17, budget=112, max_batched=512))
    request = core.add(tokens(126), 2)
    output = core.schedule()
    (part,) = parts(output)
    assert used_blocks(core) == 16 == len(part.positional)
    assert len(part.store) == part.reused == 13 and set(part.store) < set(part.positional[:14])
    core.settle()
    assert used_blocks(core) == 13 + 2, "one block of 14 is back"
    core.finish()
    assert request.num_tokens == 128
    assert (counters(core).evictions_in_place, counters(core).postponed) == (1, 0)
    assert (counters(core).store_blocks_allocated, counters(core).blocks_freed) == (0, 1)


@BOTH
@pytest.mark.parametrize("free, reused", [(4, 4), (5, 0)])
def test_fresh_blocks_only_beside_the_next_one_of_every_running_request(setup, free, reused):
    core = engine(replace(setup, max_batched=512))
    request = core.add(tokens(100), 100)
    core.hold(13 + free)
    (part,) = parts(core.schedule())
    assert part.reused == reused
    assert set(part.store).isdisjoint(part.positional) == (not reused)
    core.settle()
    core.release()
    core.finish()
    assert request.num_tokens == 200


@BOTH
def test_survivors_of_a_store_go_into_that_store(setup):
    core = engine(replace(setup, max_batched=512))
    request = core.add(tokens(100), 100)
    while request.num_computed_tokens < 163:
        core.step()
    core.settle()
    core.hold(0)
    (part,) = parts(core.schedule())
    assert part.store == part.old_store and part.reused == 4
    before = used_blocks(core)
    core.settle()
    assert before - used_blocks(core) == 8, "all of the tail"
    core.release()
    core.finish()


@BOTH
def test_nothing_reads_an_overwritten_block_through_the_prefix_cache(setup):
    core = engine(replace(setup, max_batched=512))
    core.add(tokens(100), 4)
    core.hold(13)
    (part,) = parts(core.schedule())
    assert part.reused == 4 and part.store == part.positional[10:6:-1]
    assert published(core, part.positional[:11]) == [True] * 7 + [False] * 4
    core.settle()
    core.release()
    again = core.add(tokens(100), 4)
    assert hit(core.step(), again) == 7 * 8, "what was not overwritten is still found"
    core.finish()


@BOTH
def test_without_prefix_caching_the_tail_goes_first(setup):
    core = engine(replace(setup, max_batched=512, caching=False))
    core.add(tokens(100), 4)
    core.hold(13)
    (part,) = parts(core.schedule())
    assert part.store == part.positional[10:6:-1]


@BOTH
@pytest.mark.parametrize("how", ["abort", "reset"])
def test_a_request_that_ends_between_plan_and_processing(setup, how):
    core = engine(replace(setup, max_batched=512))
    request = core.add(tokens(100), 50)
    core.hold(13)
    (part,) = parts(core.schedule())
    assert part.reused == 4
    core.release()
    core.abort(request) if how == "abort" else core.reset()
    assert used_blocks(core) == 0
    core.settle()
    assert counters(core).blocks_freed == 0
    core.finish()


def test_the_next_eviction_is_planned_before_the_last_was_processed():
    core = engine(replace(ASYNC, interval=8, window=8, max_batched=512, blocks=20))
    request = core.add(tokens(100), 40)
    core.hold(14)
    stores = [part.store for part in parts(core.step())]
    for _ in range(60):
        core.hold(min(2, core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()))
        stores += [part.store for part in parts(core.step())]
    assert len(stores) == 5 and all(set(store) == set(stores[0]) for store in stores)
    assert counters(core).evictions_in_place == 5
    assert request.num_tokens == 140
    core.release()


@BOTH
def test_groups_take_their_own_blocks(setup):
    core = engine(replace(setup, second_budget=72, blocks=99, max_batched=512))
    core.add(tokens(100), 4)
    core.hold(2 * 13)
    first, second = parts(core.schedule())
    assert (first.reused, second.reused) == (4, 8)
    assert set(first.store) < set(first.positional) and set(second.store) < set(second.positional)


@BOTH
def test_samples_of_one_prompt_are_not_evicted_while_they_share_it(setup):
    core = engine(replace(setup, max_batched=512, interval=16))
    samples = [core.add(tokens(100), 70) for _ in range(3)]
    output = core.schedule()
    assert evictions(output) == {}
    assert getattr(output, PLAN, None) is None, "who will not evict records no queries"
    assert used_blocks(core) == 13 + 2 + 2
    assert counters(core).skipped_shared == 3
    core.settle()
    for sample in samples[1:]:
        core.abort(sample)
    seen = []
    while core.scheduler.has_unfinished_requests():
        seen += evictions(core.step()).values()
    assert seen[0] == 100 + 16, "an interval later, when nobody shares it"
    core.finish()


@BOTH
def test_samples_of_one_prompt_are_evicted_all_the_same_where_asked(setup):
    core = engine(replace(setup, max_batched=512, shared="evict"))
    samples = [core.add(tokens(100), 70) for _ in range(3)]
    output = core.schedule()
    assert evictions(output) == {sample.request_id: 100 for sample in samples}
    # 13 blocks of the first, two more from position 88 on for each other, three stores.
    assert used_blocks(core) == 13 + 2 + 2 + 3 * 4
    core.settle()
    assert used_blocks(core) == 3 * (2 + 4)
    assert sum(m.blocks_saved for m in core.scheduler._evicting.values()) == 11 - 3 * 4
    core.finish()
    assert counters(core).evictions_prefill == 3 and counters(core).evictions_decode == 3


@BOTH
def test_a_sharer_is_admitted_with_what_its_eviction_must_take(setup, monkeypatch):
    monkeypatch.setattr(Forecast, "peak", lambda _: 0)
    core = engine(replace(setup, max_batched=512, shared="evict"))
    first = core.add(tokens(100), 70)
    core.hold(13 + 5)
    (part,) = parts(core.step())
    assert part.reused == 0
    core.settle()
    core.release()
    check_sharer(core, first)


def check_sharer(core, first):
    """One that shares the prompt of ``first`` waits for the blocks that its eviction must take."""
    sharer = core.add(tokens(100), 70, resumable=True)
    core.step()
    core.settle()
    second = core.add(tokens(96) + tokens(4, 9), 70)
    # Two blocks beyond the hit, and a store, of which no block is its own.
    core.hold(5)
    assert second.request_id not in core.schedule().num_scheduled_tokens
    core.settle()
    core.release(1)
    output = core.schedule()
    assert evictions(output) == {second.request_id: 100}
    assert parts(output)[0].reused == 0
    core.settle()
    core.release()
    for request in (first, sharer):
        core.abort(request)
    core.finish()


@BOTH
def test_a_running_prompt_waits_for_its_store_and_preempts_nobody(setup):
    core = engine(replace(setup, max_batched=512, long_prefill=6, shared="evict"))
    sharer = core.add(tokens(100), 70, resumable=True)
    while sharer.num_computed_tokens < 100:
        core.step()
    # A hit of 88 tokens, chunks up to 94 and 100, and a store of which no block is its own.
    request, youngest = core.add(tokens(96) + tokens(4, 9), 70), core.add(tokens(8, 7), 70)
    assert request.request_id in core.step().num_scheduled_tokens
    assert request.num_computed_tokens == 94
    core.settle()
    core.hold(3)
    output = core.step()
    assert request.num_computed_tokens == 100 and youngest.request_id in output.num_scheduled_tokens
    assert core.invariants.tally.preemptions == 0
    assert evictions(output) == {} and counters(core).postponed_blocks == 1
    core.release()
    assert evictions(core.step()) == {request.request_id: 101}
    core.abort(sharer)
    core.finish()


@BOTH
def test_a_store_of_own_blocks_and_fresh_ones(setup):
    """Three blocks of seven are shared, four stay: the store of six takes two from the pool."""
    core = engine(replace(setup, max_batched=512, budget=56, shared="evict"))
    sharer = core.add(tokens(32) + tokens(20, 5), 70, resumable=True)
    core.step()
    core.settle()
    request = core.add(tokens(32) + tokens(40, 6), 70)
    core.hold(5 + 2)
    (part,) = parts(core.schedule())
    assert (part.reused, len(part.store)) == (4, 6)
    assert core.invariants.tally.mixed == core.invariants.tally.at_a_loss == 1
    core.settle()
    core.release()
    core.abort(sharer)
    core.finish()
    assert request.num_tokens == 142


def test_a_wait_for_sharers_holds_no_ring_slot():
    core = engine(replace(ROOMY, rings=1, interval=16))
    samples = [core.add(tokens(100), 100) for _ in range(3)]
    for _ in range(30):
        output = core.step()
        plan = getattr(output, PLAN, None)
        assert plan is None or not plan.rings
    assert counters(core).skipped_shared >= 6 and counters(core).postponed == 0
    for sample in samples:
        core.abort(sample)
    core.finish()


def test_with_interval_0_a_prompt_that_was_shared_is_evicted_once_it_is_not():
    core = engine(replace(ROOMY, interval=0))
    alone, *others = [core.add(tokens(100), 100) for _ in range(3)]
    core.step()
    for other in others:
        core.abort(other)
    seen = []
    while core.scheduler.has_unfinished_requests():
        seen += evictions(core.step()).items()
    assert seen == [(alone.request_id, 100 + 4 * 8)]
    core.finish()

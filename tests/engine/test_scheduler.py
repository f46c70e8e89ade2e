"""Directed cases of the scheduler, each at the boundary where it could go wrong.

Default setup: blocks of 8, window 8, budget 40: a store of 4 blocks, so a prompt evicts from
4 * 8 + 8 + 8 = 48 tokens on, and keeps its tail from (E - 8) // 8 * 8.
"""

from dataclasses import replace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.engine.cases import (
    ASYNC,
    BOTH,
    SYNC,
    counters,
    engine,
    evictions,
    hit,
    no_stop,
    tokens,
    used_blocks,
)
from tests.engine.harness import STOP_TOKEN, Engine
from vllm_kvevict.metrics import totals
from vllm_kvevict.rules.step_plan import PLAN


@BOTH
@pytest.mark.parametrize("length, evicts", [(1, False), (47, False), (48, True), (55, True)])
def test_the_shortest_prompt_that_evicts(setup, length, evicts):
    core = engine(setup)
    request = core.add(tokens(length), 8)
    assert evictions(core.schedule()) == ({request.request_id: length} if evicts else {})
    core.settle()
    assert used_blocks(core) == (4 + (length - 40 + 7) // 8 if evicts else (length + 7) // 8)
    assert counters(core).blocks_freed == (5 if evicts else 0)
    assert counters(core).tokens_evicted == (40 - 4 * 8 if evicts else 0)
    core.finish()


@BOTH
def test_pages_of_stores_hold_more_tokens_than_blocks(setup):
    core = engine(replace(setup, store_dtype="int4", budget=8 + 2 * 30, max_batched=512))
    core.add(tokens(100), 8)
    core.schedule()
    core.settle()
    # Two pages of 30 tokens, in the place of the 88 before the tail.
    assert used_blocks(core) == 2 + 2
    assert counters(core).blocks_freed == 11
    assert counters(core).tokens_evicted == 88 - 2 * 30
    core.finish()


@BOTH
def test_prefill_in_chunks_evicts_with_its_last(setup):
    core = engine(replace(setup, max_batched=45))
    request = core.add(tokens(100), 8)
    steps = [evictions(core.step()) for _ in range(3)]
    assert steps == [{}, {}, {request.request_id: 100}]
    core.finish()


@BOTH
@pytest.mark.parametrize("max_tokens, evicted", [(1, 0), (2, 1)])
def test_a_request_that_ends_with_its_prefill_is_not_evicted(setup, max_tokens, evicted):
    core = engine(replace(setup, max_batched=512))
    core.add(tokens(100), max_tokens)
    core.schedule()
    assert used_blocks(core) == 13 + 4 * evicted, "no store is taken in vain"
    core.finish()
    assert counters(core).evictions == evicted
    assert counters(core).postponed == 0


@BOTH
def test_decode_evicts_every_stride_and_not_with_the_last_token(setup):
    core = engine(setup)
    request = core.add(tokens(100), 129)
    seen = []
    while core.scheduler.has_unfinished_requests():
        seen += evictions(core.step()).values()
    assert seen == [100, 164], "at 228 the request ends"
    assert request.num_tokens == 229
    core.finish()


@BOTH
def test_a_short_prompt_joins_when_it_has_outgrown_the_budget(setup):
    core = engine(setup)
    core.add(tokens(10), 150)
    seen = []
    while core.scheduler.has_unfinished_requests():
        seen += evictions(core.step()).values()
    assert seen == [4 * 8 + 8 + 64]
    core.finish()


@BOTH
def test_interval_0_evicts_after_prefill_only(setup):
    core = engine(replace(setup, interval=0))
    core.add(tokens(100), 150)
    core.add(tokens(10), 150)
    core.finish()
    assert (counters(core).evictions_prefill, counters(core).evictions_decode) == (1, 0)


@BOTH
def test_without_a_ring_slot_the_eviction_waits_for_a_whole_window(setup):
    core = engine(replace(setup, rings=1, max_batched=512))
    first, second = core.add(tokens(100, 1), 40), core.add(tokens(120, 2), 40)
    assert evictions(core.step()) == {first.request_id: 100}
    assert counters(core).postponed == 1
    seen = [evictions(core.step()) for _ in range(8)]
    # The slot is free from the next step on; eight decode steps fill it.
    assert seen == [{}] * 7 + [{second.request_id: 128}]
    assert counters(core).postponed == 8
    core.finish()


def test_a_slot_has_one_writer_in_a_step():
    core = engine(replace(SYNC, rings=2, interval=64, max_batched=512))
    early = core.add(tokens(100, 1), 80)
    while early.num_computed_tokens < 163:
        core.step()
    core.scheduler._turns.slots.pop()
    late = core.add(tokens(100, 2), 80)
    output = core.scheduler.schedule()
    plan = getattr(output, PLAN)
    assert evictions(output) == {late.request_id: 100}
    assert early.request_id in output.num_scheduled_tokens
    assert list(plan.rings) == [late.request_id], "it took the slot from who can wait"


@BOTH
@pytest.mark.parametrize("decode_steps", [0, 64])
def test_abort_between_plan_and_processing_frees_everything(setup, decode_steps):
    core = engine(setup)
    request = core.add(tokens(100), 100)
    output = core.schedule()
    while request.num_computed_tokens < 100 + decode_steps:
        core.process()
        output = core.schedule()
    assert evictions(output) == {request.request_id: 100 + decode_steps}
    assert used_blocks(core) >= 8
    core.abort(request)
    assert used_blocks(core) == 0
    core.settle()
    core.finish()


def test_stop_found_while_the_next_eviction_is_in_flight():
    core = Engine(ASYNC, lambda r, t: STOP_TOKEN if len(t) == 163 else no_stop(r, t))
    request = core.add(tokens(100), 100)
    while not request.is_finished():
        core.step()
    assert counters(core).evictions == 2, "at 164, planned before the stop at 163 was known"
    assert used_blocks(core) == 0
    core.finish()


@BOTH
def test_a_resumable_session_is_never_evicted_and_its_hits_are_not_capped(setup):
    core = engine(setup)
    core.add(tokens(100), 2)
    core.finish()
    session = core.add(tokens(100), 40, resumable=True)
    assert hit(core.step(), session) == 96
    for _ in range(20):
        core.step()
    core.abort(session)
    core.finish()
    assert counters(core).evictions == 1 and counters(core).prefix_hits_capped == 0


@BOTH
@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_nothing_is_left_of_a_session_that_ends(setup, audit):
    """With the request that says so: each kept a state, and its prompt, for ever."""
    core = engine(replace(setup, audit=audit, max_batched=512))
    session = core.add(tokens(60), 2, resumable=True)
    for _ in range(6):
        core.step()
    core.settle()
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    core.scheduler.add_request(Request(session.request_id, [0], SamplingParams(), None))
    assert not core.scheduler.requests and not core.scheduler._table.states
    core.finish()


@BOTH
@pytest.mark.parametrize("needs_window, covered, capped", [(True, 88, 1), (False, 96, 0)])
def test_a_hit_stops_before_the_window(setup, needs_window, covered, capped):
    core = engine(replace(setup, needs_window=needs_window))
    core.add(tokens(100), 4)
    core.finish()
    again = core.add(tokens(100), 4)
    output = core.step()
    assert hit(output, again) == covered
    assert counters(core).prefix_hits_capped == capped
    core.finish()
    assert counters(core).evictions == 2


@BOTH
def test_blocks_freed_by_eviction_are_reused_while_their_request_still_runs(setup):
    core = engine(setup)
    core.add(tokens(100), 60)
    for _ in range(4):
        core.step()
    again = core.add(tokens(100), 4)
    assert hit(core.step(), again) == 88
    core.finish()


@BOTH
def test_a_next_turn_reuses_nothing_that_was_computed_after_the_eviction(setup):
    core = engine(setup)
    first = core.add(tokens(100), 40)
    core.finish()
    turn = core.add(list(first.all_token_ids) + tokens(10, 3), 4)
    assert hit(core.step(), turn) == 96, "the prompt's full blocks"
    core.finish()


@BOTH
def test_a_next_turn_reuses_an_unevicted_answer(setup):
    core = engine(setup)
    first = core.add(tokens(20), 20)
    core.finish()
    turn = core.add(list(first.all_token_ids) + tokens(3, 3), 4)
    # 39 of its 40 tokens were computed; the last was only sampled.
    assert hit(core.step(), turn) == 32
    core.finish()


@BOTH
def test_a_preempted_request_evicts_again_at_its_new_end(setup):
    core = engine(replace(setup, max_batched=512))
    request = core.add(tokens(100), 60)
    for _ in range(20):
        core.step()
    core.settle()
    replayed = request.num_tokens
    core.reset()
    assert used_blocks(core) == 0
    assert evictions(core.step()) == {request.request_id: replayed}
    core.finish()
    assert counters(core).evictions_prefill == 2


@BOTH
def test_two_budgets_evict_in_one_plan(setup):
    core = engine(replace(setup, second_budget=72, blocks=99, max_batched=512))
    core.add(tokens(100), 4)
    output = core.schedule()
    (eviction,) = getattr(output, PLAN).evictions
    assert [(part.group_id, len(part.store)) for part in eviction.groups] == [(0, 4), (1, 8)]
    assert {part.tail_start for part in eviction.groups} == {88}
    core.settle()
    assert used_blocks(core) == (4 + 2) + (8 + 2)
    core.finish()


@BOTH
def test_a_group_that_does_not_evict_is_left_alone_but_not_published(setup):
    core = engine(replace(setup, sliding_window=16, blocks=99))
    first = core.add(tokens(100), 40)
    core.finish()
    turn = core.add(list(first.all_token_ids) + tokens(10, 3), 4)
    assert hit(core.step(), turn) <= 96
    core.finish()
    assert counters(core).evictions == 2


def test_a_scheduler_without_an_evictable_group_says_so(monkeypatch):
    from benchmarks import bare_scheduler

    plain = bare_scheduler.kv_cache_config(SYNC, evictable=False)
    monkeypatch.setattr(bare_scheduler, "kv_cache_config", lambda setup: plain)
    with pytest.raises(RuntimeError, match="without an evictable KV-cache group"):
        bare_scheduler.make_scheduler(SYNC)


@BOTH
def test_totals_are_logged_once_for_many_pauses_and_at_the_end(setup, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(totals.logger, "info", lambda form, line: lines.append(line))
    core = engine(replace(setup, max_batched=512))
    for index in range(5):
        core.add(tokens(100, index), 4)
        core.finish()
        core.abort(core.add(tokens(100, index), 4))
    assert len(lines) == 1 and lines[0].startswith("evictions=1 ")
    core.scheduler.shutdown()
    assert len(lines) == 2 and lines[1].startswith("evictions=5 ")


@BOTH
@pytest.mark.parametrize("budget", [40, 10_000])
def test_blocks_are_offered_to_the_prefix_cache_when_they_fill(setup, budget, monkeypatch):
    core = engine(replace(setup, budget=budget, max_batched=512))
    (manager,) = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    offered, publish = [], manager.cache_blocks
    monkeypatch.setattr(
        manager,
        "cache_blocks",
        lambda *args, **kwargs: offered.append(args) or publish(*args, **kwargs),
    )
    request = core.add(tokens(100), 64)
    while request.num_computed_tokens < 160:
        core.step()
    core.settle()
    assert len(offered) <= 2 + (60 // 8 + 1) * (budget > 40)
    blocks = manager.req_to_blocks[request.request_id][: request.num_tokens // 8]
    hashed = [block.block_hash is not None for block in blocks]
    assert hashed == ([False] * 11 + [True] + [False] * 8 if budget == 40 else [True] * len(blocks))
    core.finish()


@BOTH
def test_a_step_with_nothing_due_looks_at_nobody(setup, monkeypatch):
    """Also on a server whose requests may choose h2o, where only those that do are looked at."""
    core = engine(replace(setup, max_batched=512))
    for index in range(4):
        core.add(tokens(100, index), 50)
    core.step()
    turns, seen = core.scheduler._turns, []
    finish = turns.finish_step
    monkeypatch.setattr(
        turns, "finish_step", lambda state, end: seen.append(state.request_id) or finish(state, end)
    )
    for _ in range(20):
        core.step()
    assert not seen and counters(core).evictions_prefill == 4
    counting = core.add(tokens(100, 9), 50, asked={"kv_eviction": "h2o"})
    for _ in range(20):
        core.step()
    assert seen == [counting.request_id] * 20
    core.finish()

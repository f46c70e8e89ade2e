"""Directed cases of requests that bring their own settings.

Setup as in ``test_scheduler``: blocks of 8, window 8, budget 40, stride 64. A prompt of 160 with
its eviction point at 100 keeps 4 blocks of the first 88 tokens and all from 88 on.
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
from tests.engine.harness import Engine
from vllm_kvevict.rules.step_plan import PLAN

AT_100 = {"kv_eviction_at": 100}


def walk(core: Engine) -> list[int]:
    """Lengths at which evictions were planned, until all requests have finished."""
    seen: list[int] = []
    while core.scheduler.has_unfinished_requests():
        seen += evictions(core.step()).values()
    core.finish()
    return seen


@BOTH
@pytest.mark.parametrize("chunk", [30, 64, 512])
@pytest.mark.parametrize(
    "prompt, asked, expected",
    [
        (160, {}, [164]),
        (180, {}, [180]),
        (160, {"kv_eviction_interval": 0}, []),
        (180, {"kv_eviction_interval": 16}, [180, 196, 212, 228]),
        (160, {"kv_eviction_at": -60}, [164]),
    ],
)
def test_evicts_at_the_point_and_next_a_stride_later_but_not_in_prefill(
    setup, chunk, prompt, asked, expected
):
    core = engine(replace(setup, max_batched=chunk))
    core.add(tokens(prompt), 60, asked=AT_100 | asked)
    last = 230 if prompt == 180 else 210
    assert walk(core) == [100, *(n for n in expected if n < last)]
    assert counters(core).evictions_prefill == 1 + (180 in expected)
    assert counters(core).postponed == 0


@BOTH
def test_the_rest_of_the_prompt_is_held_beside_the_store(setup):
    core = engine(replace(setup, max_batched=512))
    request = core.add(tokens(160), 8, asked=AT_100)
    assert evictions(core.step()) == {request.request_id: 100}
    core.settle()
    assert used_blocks(core) == 4 + (13 - 11)
    core.step()
    core.settle()
    assert used_blocks(core) == 4 + (20 - 11)
    core.finish()


@BOTH
def test_answers_over_the_store_of_another_request_are_not_whole(setup):
    """Of 68 such answers 66 counted as answers with the full cache."""
    core = engine(replace(setup, max_batched=512, blocks=200))
    for seed in range(5):
        asked = dict(AT_100, kv_eviction_protect_first=8, kv_eviction_interval=0)
        core.add(tokens(100) + tokens(20, seed), 4, asked=asked)
        walk(core)
    core.add(tokens(20, 99), 4)
    core.finish()
    found = counters(core)
    assert found.stores_reused == 4 and found.evictions == 1
    assert (found.requests_whole, found.requests_evicted) == (1, 5)
    assert found.tokens_protected == 5 * 8


@BOTH
def test_under_a_cap_the_eviction_after_a_point_waits_for_no_second_store(setup):
    """Without one it comes when the store that others may hold counts for nothing: at a share of
    a quarter and a point of 100,000 tokens after 33,000 more."""
    lengths = []
    for cap in (None, 80):
        core = engine(replace(setup, budget=80, interval=8, cap=cap, blocks=90))
        core.add(tokens(160), 100, asked=dict(kv_eviction_at=150))
        lengths.append(walk(core))
    without, capped = lengths
    assert without[0] == capped[0] == 150
    assert capped[1] <= 160 + 2 * 8 < without[1]


@BOTH
def test_a_point_with_nothing_to_evict_means_a_prompt_too_short_to_evict(setup):
    core = engine(setup)
    core.add(tokens(160), 60, asked={"kv_eviction_at": 47})
    assert walk(core) == [161], "one token after prefill: it has long outgrown its budget"
    core = engine(setup)
    core.add(tokens(160), 60, asked={"kv_eviction_at": 47, "kv_eviction_interval": 0})
    assert walk(core) == []


@BOTH
@pytest.mark.parametrize("asked, store", [({}, (80 - 8) // 8), (AT_100, (50 - 8) // 8)])
def test_a_share_is_a_share_of_what_comes_before_the_point(setup, asked, store):
    core = engine(replace(setup, max_batched=512))
    core.add(tokens(160), 8, asked={"kv_eviction_budget": "50%"} | asked)
    (eviction,) = getattr(core.step(), PLAN).evictions
    assert len(eviction.groups[0].store) == store
    core.finish()


def test_the_next_chunk_waits_for_the_blocks_that_the_eviction_frees():
    # At the point 13 + 4 of 22 blocks are held, and the rest of the prompt takes 7 more.
    core = engine(replace(ASYNC, blocks=23, max_batched=512))
    request = core.add(tokens(160), 8, asked=AT_100)
    assert evictions(core.schedule()) == {request.request_id: 100}
    assert core.schedule().total_num_scheduled_tokens == 0
    core.process()
    assert core.schedule().num_scheduled_tokens == {request.request_id: 60}
    core.finish()
    assert core.invariants.tally.preemptions == 0 and counters(core).evictions_prefill == 1


def test_a_waiting_point_does_not_hold_up_others():
    core = engine(replace(ASYNC, max_batched=512))
    request, other = core.add(tokens(160), 8, asked=AT_100), core.add(tokens(20, 2), 8)
    core.schedule()
    assert core.schedule().num_scheduled_tokens == {other.request_id: 1}
    core.process()
    assert core.schedule().num_scheduled_tokens == {request.request_id: 60, other.request_id: 1}
    core.finish()


@BOTH
def test_a_preempted_request_evicts_at_its_point_again(setup):
    core = engine(replace(setup, max_batched=512))
    request = core.add(tokens(160), 40, asked=AT_100 | {"kv_eviction_interval": 0})
    for _ in range(20):
        core.step()
    core.settle()
    assert request.num_tokens > 170
    core.reset()
    assert evictions(core.step()) == {request.request_id: 100}
    core.finish()
    assert counters(core).evictions_prefill == 2 == counters(core).evictions


@BOTH
def test_a_hit_stops_before_the_window_of_the_point(setup):
    core = engine(setup)
    core.add(tokens(160), 4, asked={"kv_eviction": "none"})
    core.finish()
    for policy in ("snapkv", "streaming-llm"):
        again = core.add(tokens(160), 4, asked=AT_100 | {"kv_eviction": policy})
        assert hit(core.step(), again) == 88
        core.finish()
    assert counters(core).prefix_hits_capped == 2


@BOTH
@pytest.mark.parametrize("length, covered", [(53, 48), (60, 48), (70, 56)])
def test_a_hit_spares_the_window_of_an_eviction_soon_after_the_prefill(setup, length, covered):
    """At an eviction point of 47 nothing can go, so the first eviction is due after prefill."""
    core = engine(replace(setup, interval=16))
    core.add(tokens(length), 2, asked={"kv_eviction": "none"})
    core.finish()
    core.add(tokens(length), 20, asked={"kv_eviction_at": 47})
    output = core.step()
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [covered]
    due = max(4 * 8 + 8 + 16, length + 1)
    assert covered <= due - 8
    assert walk(core)[0] == due
    assert counters(core).postponed == 0


@BOTH
def test_requests_with_one_prefix_and_different_budgets_share_only_what_full_attention_saw(setup):
    """The invariants compare every published block with full attention's, after every step."""
    core = engine(replace(setup, max_batched=512, shared="evict"))
    small = core.add(tokens(160), 60, asked=AT_100)
    large = core.add(tokens(160), 60, asked=AT_100 | {"kv_eviction_budget": 72})
    plain = core.add(tokens(160), 60, asked={"kv_eviction": "none"})
    core.finish()
    stores = {"r0": 4, "r1": 8}
    assert (small.request_id, large.request_id) == tuple(stores)
    assert counters(core).evictions_prefill == 2
    # The unevicted one published all it computed; the others nothing from their point on.
    turn = core.add(list(small.all_token_ids) + tokens(9, 3), 4, asked={"kv_eviction": "none"})
    assert hit(core.step(), turn) == 160
    core.finish()
    again = core.add(list(plain.all_token_ids), 2, asked={"kv_eviction": "none"})
    assert hit(core.step(), again) == 216
    core.finish()


@BOTH
def test_nothing_after_a_point_is_published(setup):
    core = engine(setup)
    first = core.add(tokens(160), 60, asked=AT_100)
    core.finish()
    turn = core.add(list(first.all_token_ids) + tokens(9, 3), 4, asked={"kv_eviction": "none"})
    assert hit(core.step(), turn) == 96
    core.finish()


@BOTH
def test_none_is_not_evicted_beside_others_that_are(setup):
    core = engine(replace(setup, blocks=99, max_batched=512))
    plain = core.add(tokens(100, 1), 70, asked={"kv_eviction": "none"})
    other = core.add(tokens(100, 2), 70)
    assert evictions(core.step()) == {other.request_id: 100}
    seen = [*core.scheduler._table.states[plain.request_id].progress]
    assert seen == []
    core.finish()
    assert counters(core).evictions == 2


def test_a_policy_without_a_window_takes_no_ring():
    core = engine(replace(SYNC, rings=1, max_batched=512))
    core.add(tokens(100, 1), 40, asked={"kv_eviction": "streaming-llm"})
    core.add(tokens(120, 2), 40)
    core.add(tokens(110, 3), 40, asked={"kv_eviction": "streaming-llm"})
    plan = getattr(core.step(), PLAN)
    assert [(e.policy, e.ring is not None) for e in plan.evictions] == [
        ("streaming-llm", False), ("snapkv", True), ("streaming-llm", False)
    ]  # fmt: skip
    core.finish()
    assert counters(core).postponed == 0


@BOTH
def test_evictions_inside_a_named_context_say_so(setup):
    """A point one token before the end names no context."""
    core = engine(replace(setup, blocks=99, max_batched=512))
    for number, at in enumerate((100, 159, 160)):
        core.add(tokens(160, number), 40, asked={"kv_eviction_at": at})
    core.add(tokens(160, 3), 40)
    found = []
    while core.scheduler.has_unfinished_requests():
        if plan := getattr(core.step(), PLAN, None):
            found += [(e.request_id, e.num_tokens, e.in_context) for e in plan.evictions]
    first = {}
    for request, length, inside in found:
        first.setdefault(request, (length, inside))
    assert [*first.values()] == [(100, True), (159, False), (160, False), (160, False)]
    assert not any(inside for _, length, inside in found if length > 100)
    core.settle()


@BOTH
def test_own_budgets_in_two_groups(setup):
    core = engine(replace(setup, second_budget=72, blocks=99, max_batched=512))
    core.add(tokens(160), 4, asked=AT_100 | {"kv_eviction_protect_first": 5})
    core.add(tokens(160, 2), 4, asked=AT_100 | {"kv_eviction_budget": "40%"})
    plan = getattr(core.step(), PLAN)
    assert [[len(g.store) for g in e.groups] for e in plan.evictions] == [[5, 9], [4, 4]]
    assert [e.protect_first for e in plan.evictions] == [5, 0]
    core.finish()


def test_settings_that_slipped_past_the_front_door_do_not_stop_the_engine(caplog):
    core = engine(SYNC)
    core.add(tokens(100), 4, asked={"kv_eviction_at": 101})
    assert walk(core) == [100]


@BOTH
def test_a_session_of_streaming_input_is_not_evicted_and_waits_for_nothing(setup):
    """The front door refuses its settings; the engine ignores them."""
    core = engine(replace(setup, max_batched=512))
    session = core.add(tokens(160), 4, asked=AT_100, resumable=True)
    other = core.add(tokens(160, 2), 30, asked=AT_100)
    output = core.step()
    assert output.num_scheduled_tokens == {session.request_id: 160, other.request_id: 100}
    assert evictions(output) == {other.request_id: 100}
    for _ in range(12):
        assert session.request_id not in evictions(core.step())
    core.abort(session)
    core.finish()
    # Both are the other's, at 100 and at 164.
    assert (counters(core).evictions_prefill, counters(core).evictions_decode) == (1, 1)


@BOTH
def test_a_request_whose_queries_all_count_takes_no_hit(setup):
    """Others may take what it computed; where nothing will be evicted it takes hits itself."""
    core = engine(setup)
    policy = {"kv_eviction": "h2o"}
    core.add(tokens(160), 4, asked=policy)
    core.finish()
    for asked, covered in (
        (policy, 0),
        (policy | AT_100, 0),
        ({"kv_eviction": "streaming-llm"}, 152),
        (policy | {"kv_eviction_budget": 200, "kv_eviction_interval": 0}, 152),
    ):
        capped = counters(core).prefix_hits_capped
        again = core.add(tokens(160), 4, asked=asked)
        assert hit(core.step(), again) == covered
        assert counters(core).prefix_hits_capped == capped + (covered == 0)
        core.finish()
    assert counters(core).evictions == 4


@BOTH
@pytest.mark.parametrize(
    "interval, counted", [(0, range(160)), (64, range(224))], ids=["once", "again"]
)
def test_queries_count_until_the_last_eviction(setup, interval, counted):
    """Every token of prefill and decode once, in order, and none that no eviction will read."""
    core = engine(replace(setup, max_batched=50))
    request = core.add(
        tokens(160), 72, asked={"kv_eviction": "h2o", "kv_eviction_interval": interval}
    )
    seen: list[int] = []
    while core.scheduler.has_unfinished_requests():
        start = request.num_computed_tokens
        output = core.step()
        plan = getattr(output, PLAN, None)
        if plan is not None and plan.accumulating:
            assert plan.accumulating == [request.request_id]
            seen += range(start, start + output.num_scheduled_tokens[request.request_id])
    core.finish()
    assert seen == list(counted)
    assert counters(core).evictions == 1 + (interval > 0)

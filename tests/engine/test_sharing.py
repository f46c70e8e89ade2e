"""Directed cases of stores that requests take from one another.

Setup as in ``test_scheduler``: blocks of 8, window 8, budget 40, stride 64. A prompt with its
eviction point at 100 keeps 4 blocks of the first 88 tokens, and the blocks from 88 on; the point
lies inside the second of these.
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
from vllm_kvevict.engine.ring_queue import RingQueue
from vllm_kvevict.rules.rule import MIN_DECODE_EVICTIONS
from vllm_kvevict.rules.step_plan import PLAN

AT_100 = {"kv_eviction_at": 100}
DOCUMENT = tokens(100)


def ask(core: Engine, seed: int, max_tokens: int = 20, **options):
    """A question of 30 tokens about the document."""
    asked = AT_100 | options.pop("asked", {})
    return core.add(DOCUMENT + tokens(30, seed), max_tokens, asked=asked, **options)


def idle(stores) -> int:
    """Idle stores, counted now."""
    stores.sweep()
    return stores.idle


def run_first(core: Engine, steps: int = 4):
    first = ask(core, 1, 200)
    for _ in range(steps):
        core.step()
    assert counters(core).stores_published == 1
    return first


@BOTH
@pytest.mark.parametrize("shared", ["keep", "evict"])
@pytest.mark.parametrize("point", [100, 104])
def test_a_second_request_computes_only_what_follows_the_point(setup, shared, point):
    core = engine(replace(setup, max_batched=512, shared=shared))
    asked = {"kv_eviction_at": point}
    core.add(tokens(130), 200, asked=asked)
    for _ in range(4):
        core.step()
    before = used_blocks(core)
    second = core.add(tokens(point) + tokens(30, 2), 20, asked=asked)
    output = core.step()
    assert hit(output, second) == point and output.num_scheduled_tokens[second.request_id] == 30
    own = (point + 30 + 7) // 8 - point // 8
    assert used_blocks(core) == before + own, "the store and the whole blocks behind it are shared"
    assert counters(core).stores_reused == 1 and counters(core).tokens_reused == point
    core.finish()
    assert core.invariants.tally.taken_in_use == 1


@BOTH
def test_requests_wait_for_the_one_that_makes_their_store(setup):
    core = engine(replace(setup, max_batched=40))
    first, *others = [ask(core, seed) for seed in range(4)]
    while not evictions(output := core.step()):
        assert list(output.num_scheduled_tokens) in ([first.request_id], [])
    core.finish()
    assert counters(core).stores_reused == len(others)
    assert counters(core).evictions_prefill == 1


@BOTH
def test_others_go_on_where_the_maker_is_aborted(setup):
    core = engine(replace(setup, max_batched=40))
    first, second, third = [ask(core, seed) for seed in range(3)]
    core.step()
    core.abort(first)
    seen: dict[str, int] = {}
    while core.scheduler.has_unfinished_requests():
        seen |= evictions(core.step())
    core.finish()
    assert seen[second.request_id] == 100 and third.request_id not in seen
    assert counters(core).stores_reused == 1


@BOTH
def test_the_maker_may_end_while_others_hold_its_store(setup):
    core = engine(replace(setup, max_batched=512))
    first = run_first(core)
    ask(core, 2, 60)
    core.step(between=lambda: core.abort(first))
    ask(core, 3)
    core.finish()
    assert counters(core).stores_reused == 2 and counters(core).evictions_prefill == 1


@BOTH
def test_an_idle_store_is_taken_and_leaves_as_a_whole(setup):
    core = engine(replace(setup, max_batched=512))
    core.abort(run_first(core))
    core.settle()
    shared = core.scheduler._stores
    assert idle(shared) == 1 and used_blocks(core) == 0
    core.abort(ask(core, 2))
    second = ask(core, 3)
    assert hit(core.step(), second) == 100 and idle(shared) == 0
    core.abort(second)
    core.settle()
    # The pool hands out what was used least recently; the store was used last.
    pool = core.scheduler.kv_cache_manager.block_pool
    held = len(shared._published[next(iter(shared._published))].hashes)
    core.hold(held)
    assert idle(shared) == 1
    core.release()
    core.hold(held - 1)
    core.release()
    assert idle(shared) == 0 and pool.get_num_free_blocks() == core.setup.blocks - 1
    third = ask(core, 4)
    assert hit(core.step(), third) < 100
    core.finish()
    assert counters(core).stores_published == 2 and counters(core).evictions_prefill == 2


@BOTH
def test_reset_forgets_stores(setup):
    core = engine(replace(setup, max_batched=512))
    run_first(core)
    core.reset()
    core.finish()
    assert counters(core).stores_reused == 0 and counters(core).stores_published == 2


@BOTH
def test_a_preempted_request_takes_the_store_again(setup):
    core = engine(replace(setup, max_batched=512))
    run_first(core)
    second = ask(core, 2, 100)
    for _ in range(6):
        core.step()
    held = core.setup.blocks - 1 - used_blocks(core)
    core.hold(0)
    while not second.num_preemptions:
        core.step()
    core.release(held)
    core.finish()
    assert core.invariants.tally.taken_again == 1


@BOTH
def test_a_later_eviction_leaves_the_store_to_others(setup):
    core = engine(replace(setup, max_batched=512, shared="evict"))
    run_first(core)
    ask(core, 2, 200)
    for _ in range(120):
        core.step()
    assert counters(core).evictions_decode >= 2
    third = ask(core, 3)
    assert hit(core.step(), third) == 100
    core.finish()


def turn(core: Engine, former, more: int, **asked):
    """The next question of a chat: all that was said, and ``more`` tokens."""
    prompt = list(former.all_token_ids) + tokens(more, seed=77)
    return core.add(prompt, 20, asked=AT_100 | asked)


@BOTH
@pytest.mark.parametrize("point", [100, 104])
@pytest.mark.parametrize("maker", [True, False], ids=["maker", "taker"])
@pytest.mark.parametrize("second_budget", [None, 80, 200])
def test_a_turn_takes_what_the_one_before_computed(setup, point, maker, second_budget):
    core = engine(replace(setup, max_batched=512, second_budget=second_budget, blocks=160))
    asked = {"kv_eviction_at": point, "kv_eviction_interval": 0}
    if not maker:
        core.add(tokens(point) + tokens(30, 5), 200, asked=asked)
        core.step()
    first = core.add(tokens(point) + tokens(30, 1), 36, asked=asked)
    while not first.is_finished():
        core.step()
    computed = first.num_tokens - 1
    second = turn(core, first, 30, **asked)
    output = core.step()
    assert hit(output, second) == computed // 8 * 8 > point
    third = core.add(tokens(point) + tokens(30, 2) + tokens(60, 3), 20, asked=asked)
    assert hit(core.step(), third) == point, "it asked something else"
    core.finish()
    fourth = turn(core, second, 5, **asked)
    assert hit(core.step(), fourth) == (second.num_tokens - 1) // 8 * 8
    core.finish()
    assert core.invariants.tally.taken_behind == 2 and counters(core).evictions_prefill == 1


@BOTH
def test_a_turn_takes_nothing_that_was_computed_after_the_next_eviction(setup):
    core = engine(replace(setup, max_batched=512))
    first = ask(core, 1, 80)
    core.finish()
    assert counters(core).evictions_decode == 1, "at 164"
    second = turn(core, first, 10)
    assert hit(core.step(), second) == 160
    core.finish()


@BOTH
def test_a_turn_computes_the_window_of_its_next_eviction(setup):
    core = engine(replace(setup, max_batched=512))
    first = ask(core, 1, 60, asked={"kv_eviction_interval": 0})
    core.finish()
    second = core.add(list(first.all_token_ids[:180]), 20, asked=AT_100)
    output = core.step()
    assert hit(output, second) == 168, "it evicts at the end of its prefill"
    assert evictions(output) == {second.request_id: 180}
    core.finish()


@BOTH
def test_what_lies_behind_goes_with_its_store(setup):
    core = engine(replace(setup, max_batched=512))
    asked = {"kv_eviction_interval": 0}
    first = ask(core, 1, 40, asked=asked)
    core.finish()
    core.reset()
    ask(core, 2, asked=asked)
    core.finish()
    second = turn(core, first, 10, **asked)
    assert hit(core.step(), second) == 100
    core.finish()
    assert counters(core).stores_published == 2


@pytest.mark.parametrize(
    "asked, options",
    [
        ({"kv_eviction_budget": 60}, {}),
        ({"kv_eviction": "streaming-llm"}, {}),
        ({"kv_eviction_protect_first": 4}, {}),
        ({"kv_eviction_at": 99}, {}),
        ({}, {"cache_salt": "other"}),
        ({}, {"salted": True}),
        ({}, {"document": [7, *DOCUMENT[1:]]}),
        ({}, {"document": [*DOCUMENT[:-1], 7]}),
    ],
    ids=["budget", "policy", "protected", "point", "salt", "a salt", "first token", "last token"],
)
def test_other_settings_other_stores(asked, options):
    core = engine(replace(SYNC, max_batched=512))
    if options.pop("salted", False):
        ask(core, 1, 200, cache_salt="mine")
        core.step()
    else:
        run_first(core)
    prompt = options.pop("document", DOCUMENT) + tokens(30, 1)
    core.add(prompt, 20, asked=AT_100 | asked, **options)
    core.step()
    assert counters(core).evictions_prefill == 2
    core.finish()
    assert counters(core).stores_reused == 0 and counters(core).stores_published == 2


def test_another_adapter_another_store():
    from vllm.lora.request import LoRARequest

    core = engine(replace(SYNC, max_batched=512))
    run_first(core)
    ask(core, 1, lora_request=LoRARequest("adapter", 1, "/nowhere"))
    core.step()
    ask(core, 2, lora_request=LoRARequest("adapter", 1, "/nowhere"))
    core.finish()
    assert counters(core).stores_published == 2 and counters(core).stores_reused == 1


@pytest.mark.parametrize(
    "change",
    [dict(caching=False), dict(full=True)],
    ids=["no prefix caching", "full attention that does not evict"],
)
def test_nothing_is_shared(change):
    core = engine(replace(SYNC, max_batched=512, **change))
    for seed in range(3):
        ask(core, seed)
        core.step()
    core.finish()
    assert counters(core).stores_published == counters(core).stores_reused == 0
    assert counters(core).evictions_prefill == 3


def test_an_interval_shorter_than_the_window_needs_queries_before_the_point():
    core = engine(replace(SYNC, max_batched=512, window=16, interval=8))
    for seed in range(2):
        ask(core, seed)
        core.step()
    core.finish()
    assert counters(core).evictions_prefill >= 2 and counters(core).stores_published == 0
    assert counters(core).postponed == 0


def test_sums_of_attention_are_not_shared():
    core = engine(replace(SYNC, max_batched=512))
    for seed in range(2):
        ask(core, seed, asked={"kv_eviction": "h2o"})
        core.step()
    core.finish()
    assert counters(core).evictions_prefill == 2 and counters(core).stores_published == 0


@BOTH
@pytest.mark.parametrize("second", [80, 200])
def test_groups_share_what_each_of_them_keeps(setup, second):
    """A group whose budget covers the document keeps its blocks, and shares them."""
    core = engine(replace(setup, max_batched=512, second_budget=second, blocks=128))
    run_first(core)
    other = ask(core, 2)
    assert hit(core.step(), other) == 100
    core.finish()
    assert counters(core).stores_reused == 1


def test_a_prompt_that_ends_at_its_point_takes_nothing():
    core = engine(replace(ASYNC, max_batched=512))
    run_first(core)
    core.add(DOCUMENT, 20, asked=AT_100)
    core.finish()
    assert counters(core).stores_reused == 0


def test_nobody_waits_where_the_store_cannot_be_made():
    """Somebody who does not evict holds the document, so evictions are put off."""
    core = engine(replace(SYNC, max_batched=200, blocks=128))
    core.add([*DOCUMENT, 5], 200, asked={"kv_eviction": "none"})
    core.step()
    ask(core, 1)
    core.step()
    assert counters(core).skipped_shared == 1
    others = [ask(core, seed) for seed in (2, 3, 4)]
    assert {r.request_id for r in others} <= core.step().num_scheduled_tokens.keys()
    core.finish()
    assert counters(core).stores_published == 0


@BOTH
@pytest.mark.parametrize("recorded", [True, False])
def test_a_store_that_was_scored_without_its_window_is_not_shared(setup, recorded, monkeypatch):
    """A policy with an optional window evicts without one if no ring slot is free.

    The key does not say so, and the next request might have had a slot.
    """
    setup = replace(setup, prefill_interval=64, rings=1, max_batched=512)
    core = engine(setup)
    table = core.scheduler._table
    table.needs = {name: replace(needs, window="optional") for name, needs in table.needs.items()}
    if not recorded:
        monkeypatch.setattr(RingQueue, "record_prefill", lambda *_: None)
        core.worker.setup = replace(setup, needs_window=False)
    request = core.add(tokens(130), 4)
    while not request.is_finished():
        core.step()
    core.settle()
    assert counters(core).evictions_prefill >= 2
    assert counters(core).stores_published == recorded


def lengths_of(
    core: Engine, questions, at_once: bool, counts: list[int] | None = None
) -> dict[int, list[tuple[int, list[int]]]]:
    """Lengths and groups of the evictions after the point, by question; ``counts`` gets their
    number in each step."""
    names, seen = {}, {number: [] for number in range(len(questions))}

    def run() -> None:
        while core.scheduler.has_unfinished_requests():
            plan = getattr(core.step(), PLAN, None)
            if counts is not None:
                counts.append(len(plan.evictions) if plan else 0)
            for one in plan.evictions if plan else ():
                if one.num_tokens > 100:
                    groups = [part.group_id for part in one.groups]
                    seen[names[one.request_id]].append((one.num_tokens, groups))
        core.settle()

    for number, question in enumerate(questions):
        names[core.add(DOCUMENT + question, 150, asked=AT_100).request_id] = number
        if not at_once:
            run()
    run()
    return seen


@BOTH
@pytest.mark.parametrize("budgets", [(40, None), (88, None), (40, 88), (40, 120)], ids=str)
def test_evictions_after_the_point_do_not_depend_on_how_many_ask(setup, budgets):
    """A budget of 120 covers the document, whose blocks its group shares."""
    first, second = budgets
    setup = replace(setup, max_batched=512, interval=16, budget=first, second_budget=second)
    questions = [tokens(20 + 9 * seed, seed) for seed in range(1, 4)]
    found = []
    for at_once in (False, True):
        core = engine(replace(setup, blocks=200))
        found.append(lengths_of(core, questions, at_once))
        assert counters(core).stores_reused == len(questions) - 1
        assert counters(core).skipped_shared == counters(core).postponed == 0
        core.finish()
    assert found[0] == found[1] and all(found[0].values())


@BOTH
def test_requests_that_are_due_in_one_step_take_turns_at_the_same_length(setup):
    setup = replace(setup, max_batched=512, interval=16, blocks=200)
    questions = [tokens(20, seed) for seed in range(1, 9)]
    counts: list[int] = []
    alone = lengths_of(engine(setup), questions, at_once=False)
    core = engine(setup)
    assert lengths_of(core, questions, at_once=True, counts=counts) == alone
    assert max(counts) == MIN_DECODE_EVICTIONS and counters(core).postponed == 0
    core.finish()


@BOTH
def test_a_request_over_a_shared_store_evicts_as_soon_as_it_gains(setup):
    """At 120 + 16 k: four blocks are kept, and the first whole block after the point is at 104."""
    core = engine(replace(setup, max_batched=512, interval=16))
    found = lengths_of(core, [tokens(20, 1)], at_once=False)
    assert [n for n, _ in found[0]][:2] == [152, 168]


@BOTH
def test_a_preempted_prompt_makes_the_store_that_it_scores(setup):
    """Its replay includes its answer, and its budget is a smaller share of both."""
    core = engine(replace(setup, prefill_interval=64, max_batched=512))
    table, shares = core.scheduler._table, {}
    table.needs = {
        name: replace(needs, key_scores=True, floats_per_token=max(1, needs.floats_per_token))
        for name, needs in table.needs.items()
    }

    def step() -> None:
        plan = getattr(core.step(), PLAN, None)
        for one in plan.evictions if plan else ():
            if one.num_tokens == 104:
                shares.setdefault(one.request_id, []).append(one.share)

    first = core.add(tokens(130), 60)
    while first.num_output_tokens < 40:
        step()
    core.settle()
    core.reset()
    length = first.num_tokens
    while len(shares[first.request_id]) < 2:
        step()
    assert shares[first.request_id] == [40 / 130, 40 / length]
    core.abort(first)
    same = core.add(tokens(130), 4)
    longer = core.add(tokens(130) + tokens(length - 130, 5), 4)
    while core.scheduler.has_unfinished_requests():
        step()
    assert shares[same.request_id] == [40 / 130], "its store is scored for its own share"
    assert longer.request_id not in shares and counters(core).stores_reused == 1
    core.finish()

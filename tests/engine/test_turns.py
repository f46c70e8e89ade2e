"""Ring slots where there are fewer than requests, and how much a step may evict."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from tests.engine.cases import counters, engine, evictions, tokens
from tests.engine.harness import Engine, Setup

SETUP = Setup(budget=40, window=8, interval=16, blocks=400, max_batched=512, rings=1)
BOTH = pytest.mark.parametrize("setup", [SETUP, replace(SETUP, asynchronous=True)])


@BOTH
def test_prompts_evict_at_their_end_while_others_record(setup):
    core = engine(setup)
    for index in range(4):
        core.add(tokens(30, index), 150)
    for _ in range(60):
        core.step()
    assert counters(core).evictions_decode > 0
    for index in range(6):
        request = core.add(tokens(100, 10 + index), 4)
        assert request.request_id in evictions(core.step()), "no slot for a prompt"
        for _ in range(3):
            core.step()
    core.finish()
    assert counters(core).evictions_prefill == 6


@BOTH
def test_a_slot_goes_round(setup):
    core = engine(setup)
    requests = [core.add(tokens(30, index), 200) for index in range(4)]
    seen: Counter[str] = Counter()
    while core.scheduler.has_unfinished_requests():
        seen.update(evictions(core.step()).keys())
    assert min(seen[request.request_id] for request in requests) >= max(seen.values()) - 1 > 2
    assert counters(core).postponed_ring > 0
    assert counters(core).postponed == counters(core).postponed_ring
    core.settle()


@BOTH
def test_requests_admitted_together_do_not_evict_together(setup):
    core = engine(replace(setup, rings=None, max_num_seqs=12, interval=64))
    for index in range(12):
        core.add(tokens(30, index), 250)
    most = []
    while core.scheduler.has_unfinished_requests():
        most.append(len(evictions(core.step())))
    assert max(most) == 4
    assert sum(most) == 12 * 3 and counters(core).postponed_turn > 0
    core.settle()


SHORT = {"kv_eviction_interval": 1}
LONG = {"kv_eviction_interval": 512}


@pytest.mark.slow
@pytest.mark.parametrize(
    "interval, asked",
    [
        (0, [SHORT]),
        (0, [SHORT, None, LONG]),
        (16, [None, LONG]),
        (64, [SHORT, LONG]),
        (500, [SHORT]),
    ],
)
def test_no_mix_of_intervals_evicts_more_in_a_step(interval, asked):
    """The server's interval alone decides, or four windows on a server that evicts once."""
    running = 36
    setup = replace(SETUP, rings=None, interval=interval, max_num_seqs=running)
    core = engine(replace(setup, blocks=1500, max_batched=4096))
    for index in range(running):
        core.add(tokens(60, index), 80, asked=asked[index % len(asked)])
    most = in_prefill = 0
    while core.scheduler.has_unfinished_requests():
        found = evictions(core.step())
        most = max(most, sum(end > 60 for end in found.values()))
        in_prefill += sum(end == 60 for end in found.values())
    assert in_prefill == running
    assert 0 < most <= max(4, math.ceil(2 * running / (interval or 32)))
    core.settle()


@pytest.mark.slow
def test_short_intervals_take_no_turns_from_long_ones():
    """More requests want to evict every eight steps than a step has turns for."""
    setup = replace(SETUP, rings=None, interval=64, max_num_seqs=41)
    core = engine(replace(setup, blocks=2500, max_batched=4096))
    for index in range(40):
        core.add(tokens(60, index), 230, asked=SHORT)
    request = core.add(tokens(60, 100), 230)
    seen: Counter[str] = Counter()
    while core.scheduler.has_unfinished_requests():
        seen.update(evictions(core.step()).keys())
    assert counters(core).postponed_turn > 0
    # At 60, and then every 64 steps and a round of the others, which takes ten steps.
    assert seen[request.request_id] == 1 + 230 // (64 + 10)
    assert min(seen.values()) >= 230 // (64 + 10)
    core.settle()


@BOTH
def test_requests_that_can_never_evict_need_nothing(setup):
    core = engine(setup)
    prompt = tokens(97)
    for max_tokens, hit in ((1, 0), (1, 96), (8, 88)):
        request = core.add(prompt, max_tokens)
        output = core.step()
        assert output.num_scheduled_tokens[request.request_id] == 97 - hit
        rings = getattr(output, "kv_eviction_plan", None)
        assert (rings is not None and bool(rings.rings)) == (max_tokens > 1)
        core.finish()
    assert counters(core).evictions == 1


@BOTH
def test_a_request_that_ends_before_its_next_eviction_takes_no_slot(setup):
    core = engine(setup)
    request = core.add(tokens(100), 17)
    core.step()
    rings = [bool(getattr(core.step(), "kv_eviction_plan", None)) for _ in range(15)]
    assert request.num_computed_tokens >= 115 and not any(rings)
    core.finish()


def test_a_hit_is_capped_once_a_request_and_looked_up_once(monkeypatch):
    core: Engine = engine(replace(SETUP, rings=None))
    prompt = tokens(97)
    core.add(prompt, 1)
    core.finish()
    # The 12 full blocks of the prompt are left, and it needs 13.
    pool = core.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 12)
    manager = core.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    looked, original = [], type(manager).find_longest_cache_hit
    monkeypatch.setattr(
        manager,
        "find_longest_cache_hit",
        lambda **options: looked.append(options) or original(**options),
    )
    core.add(prompt, 8)
    for _ in range(3):
        assert not core.scheduler.schedule().num_scheduled_tokens, "it waits for blocks"
    assert len(looked) == 3
    assert counters(core).prefix_hits_capped == 1
    pool.free_blocks(taken)
    core.finish()
    assert counters(core).prefix_hits_capped == 1 and counters(core).evictions == 1

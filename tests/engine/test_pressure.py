"""Eviction under pressure: nobody while memory lasts, and the right ones when it does not.

Blocks of 8, window 8, budget 40: a store of 4 blocks, as in ``test_scheduler``. The pool is of 200
blocks, so the marks are 20 and 40 beside the reserve.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulate.__main__ import simulate
from benchmarks.simulate.options import Options
from tests.engine.cases import counters, engine, evictions, tokens
from tests.engine.harness import Engine, Setup
from tests.models import cached_tiny_llama
from tests.nightly import nightly
from vllm_kvevict.rules.step_plan import PLAN

SYNC = Setup(
    interval=16, blocks=200, max_num_seqs=8, max_batched=512, when="pressure", marks=(0.1, 0.2)
)
ASYNC = replace(SYNC, asynchronous=True)
BOTH = pytest.mark.parametrize("setup", [nightly(SYNC), ASYNC], ids=["sync", "async"])
NO_WINDOW = {"kv_eviction": "streaming-llm"}


def free(core: Engine) -> int:
    return core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def recording(output: Any) -> set[str]:
    plan = getattr(output, PLAN, None)
    return set(plan.rings) if plan else set()


def preempted(core: Engine) -> int:
    return core.invariants.tally.preemptions


@BOTH
def test_nobody_evicts_or_records_while_memory_lasts(setup):
    core = engine(setup)
    core.add(tokens(300), 200)
    core.add(tokens(200, 1), 100)
    for _ in range(150):
        assert not hasattr(core.step(), PLAN)
    assert core.add(tokens(300), 3).num_computed_tokens == 0
    assert hit_of(core) == 296, "no window must be computed: the hit is stock vLLM's"
    core.finish()
    assert counters(core).evictions == counters(core).prefix_hits_capped == 0
    assert counters(core).requests_whole == 3 and counters(core).requests_evicted == 0


def hit_of(core: Engine) -> int:
    (new,) = core.step().scheduled_new_reqs
    return new.num_computed_tokens


@BOTH
def test_below_the_low_mark_who_gives_most_evicts_until_the_high_one(setup):
    core = engine(setup)
    small, large, medium = (core.add(tokens(n, n), 300) for n in (44, 500, 300))
    for _ in range(3):
        core.step()
    marks = core.scheduler._memory.watermarks
    core.hold(marks.low - 1)
    seen: dict[str, int] = {}
    for step in range(setup.window + 3):
        seen |= dict.fromkeys(evictions(core.step()), step)
    assert list(seen) == [large.request_id]
    assert free(core) >= marks.high, "and that was enough"
    core.hold(marks.low - 1)
    for step in range(setup.window + 3):
        seen |= dict.fromkeys(evictions(core.step()), step)
    assert list(seen) == [large.request_id, medium.request_id]
    assert small.request_id not in seen
    core.release()
    core.finish()


@BOTH
def test_only_those_that_are_called_hold_a_slot(setup):
    core = engine(setup)
    requests = [core.add(tokens(n, n), 300) for n in (100, 500, 300)]
    for _ in range(3):
        core.step()
    core.hold(core.scheduler._memory.watermarks.low - 1)
    slots = [recording(core.step()) for _ in range(setup.window)]
    assert slots == [{requests[1].request_id}] * setup.window
    core.settle()
    assert core.scheduler._turns.slots.num_free == setup.ring_count
    core.release()
    core.finish()


@BOTH
def test_without_a_window_the_eviction_comes_with_the_step_that_finds_blocks_short(setup):
    core = engine(setup)
    request = core.add(tokens(500), 300, asked=NO_WINDOW)
    core.add(tokens(300, 1), 300)
    for _ in range(3):
        core.step()
    core.hold(core.scheduler._memory.watermarks.low - 1)
    assert list(evictions(core.step())) == [request.request_id]
    core.release()
    core.finish()


@BOTH
def test_a_prompt_evicts_with_its_last_step(setup):
    core = engine(replace(setup, max_batched=200))
    core.add(tokens(300, 1), 300)
    for _ in range(3):
        core.step()
    core.hold(60)
    request = core.add(tokens(450), 10)
    seen = [evictions(core.step()).get(request.request_id) for _ in range(3)]
    assert seen == [None, None, 450]
    core.release()
    core.finish()


@BOTH
def test_requests_below_their_budgets_are_left_alone(setup):
    core = engine(setup)
    for index in range(8):
        core.add(tokens(40, index), 5)
    for _ in range(2):
        core.step()
    core.hold(2)
    for _ in range(3):
        assert not evictions(core.step())
    assert core.scheduler._memory.watermarks.pressing
    core.release()
    core.finish()
    assert counters(core).evictions == 0


@BOTH
def test_the_least_important_go_first(setup):
    core = engine(replace(setup, priority=True))
    large = core.add(tokens(500), 300, priority=0)
    small = core.add(tokens(200, 1), 300, priority=7)
    for _ in range(3):
        core.step()
    core.hold(core.scheduler._memory.watermarks.low - 1)
    seen: list[str] = []
    while len(seen) < 2:
        seen += evictions(core.step())
    assert seen == [small.request_id, large.request_id]
    core.release()
    core.finish()


@BOTH
def test_who_was_evicted_last_goes_last(setup):
    core = engine(replace(setup, blocks=400, interval=8))
    requests = [core.add(tokens(200, n), 300) for n in range(4)]
    for _ in range(4):
        core.step()
    seen: list[str] = []
    for _ in range(250):
        core.settle()
        core.hold(min(free(core), core.scheduler._memory.watermarks.low - 1))
        seen += evictions(core.step())
    rounds = Counter(seen)
    assert set(rounds) == {r.request_id for r in requests}
    assert max(rounds.values()) - min(rounds.values()) <= 1, rounds
    for start in range(len(seen) - 3):
        assert len(set(seen[start : start + 4])) == 4, "nobody twice before all others"
    core.release()
    core.finish()


@BOTH
@pytest.mark.parametrize("policy", ["snapkv", "streaming-llm"])
def test_eviction_comes_before_queueing(setup, policy):
    core = engine(replace(setup, marks=(0.0, 0.0)))
    asked = {"kv_eviction": policy}
    first = [core.add(tokens(700, n), 400, asked=asked) for n in range(2)]
    for _ in range(4):
        core.step()
    late = core.add(tokens(600, 5), 10)
    waited = 0
    while not late.num_computed_tokens:
        core.step()
        waited += 1
    assert waited <= setup.window + 5 if policy == "snapkv" else waited <= 4
    assert not any(request.is_finished() for request in first)
    core.finish()
    assert preempted(core) == 0 and counters(core).evictions_pressure > 0


@BOTH
@pytest.mark.parametrize("policy", ["snapkv", "streaming-llm", nightly("h2o")])
def test_eviction_comes_before_preemption(setup, policy):
    """Every request alone fits; all of them do only where they are evicted."""
    load = [(tokens(150, n), 300) for n in range(8)]
    results = {}
    for name in ("none", policy):
        core = engine(replace(setup, marks=(0.05, 0.1)))
        for prompt, most in load:
            core.add(prompt, most, asked={"kv_eviction": name})
        core.finish()
        results[name] = preempted(core), counters(core).evictions
    assert results["none"][0] > 0 == results["none"][1]
    assert results[policy][0] == 0 < results[policy][1]


@BOTH
def test_who_is_near_its_end_evicts_again_before_anybody_is_preempted(setup):
    """Answers of three intervals over a pool for a third of them, and none ends early."""
    results = {}
    for name in ("none", "snapkv"):
        pool = dict(blocks=97, max_num_seqs=16, marks=(0.05, 0.1))
        burst = replace(setup, budget=48, interval=32, **pool)
        core = Engine(burst, sample=lambda request_id, tokens: 2 + len(tokens) % 900)
        waiting = [tokens(96, n) for n in range(16)]
        for _ in range(12):
            core.add(waiting.pop(), 96, asked={"kv_eviction": name})
        while core.scheduler.has_unfinished_requests():
            core.step()
            while waiting and sum(not one.is_finished() for one in core.requests) < 12:
                core.add(waiting.pop(), 96, asked={"kv_eviction": name})
        core.finish()
        results[name] = preempted(core), core.steps, counters(core).evictions_pressure
    assert results["none"][0] > 0 == results["snapkv"][0], results
    assert results["snapkv"][1] < 0.7 * results["none"][1], results
    assert results["snapkv"][2] > 16, results


@BOTH
def test_a_server_that_always_evicts_may_be_asked_to_wait_for_pressure(setup):
    core = engine(replace(setup, when="always"))
    whole = core.add(tokens(300), 20, asked={"kv_eviction_when": "pressure"})
    usual = core.add(tokens(300, 1), 20)
    core.finish()
    assert counters(core).evictions_prefill == counters(core).requests_evicted == 1
    assert whole.num_tokens == usual.num_tokens == 320


@BOTH
def test_a_request_under_pressure_may_ask_to_be_evicted_at_once(setup):
    core = engine(setup)
    request = core.add(tokens(300), 20, asked={"kv_eviction_when": "always"})
    assert evictions(core.step()) == {request.request_id: 300}
    core.finish()
    assert counters(core).evictions_pressure == 0


@BOTH
def test_an_eviction_point_counts_where_it_still_lies_ahead(setup):
    core = engine(replace(setup, max_batched=64))
    core.hold(60)
    request = core.add(tokens(420), 10, asked={"kv_eviction_at": 250})
    seen: list[int] = []
    while request.num_computed_tokens < 420:
        seen += evictions(core.step()).values()
    assert seen[0] == 250
    core.release()
    core.finish()


@BOTH
def test_a_long_queue_is_promised_what_its_first_prompts_need(setup, monkeypatch):
    core = engine(replace(setup, max_num_seqs=40))
    for n in range(1, 60):
        core.add(tokens(120, n), 10)
    demand, room = core.scheduler._memory, core.scheduler.max_num_active_reqs
    assert demand.promised() == room * 15, "prompts of 15 blocks, as many as the batch has room for"
    monkeypatch.setattr("vllm_kvevict.engine.memory_pressure.MAX_COUNTED_PROMPTS", 2)
    assert demand.promised() == room * 15
    core.finish()


def test_in_the_simulator() -> None:
    arguments = (
        f"--model {cached_tiny_llama(kv_heads=2)} --max-num-seqs 16 --prompt 600-700 "
        "--output-len 80-160 --requests 40 --steps 4000 --setting stock --setting snapkv:128 "
        "--setting snapkv:128,when=pressure"
    ).split()
    ample = Options.parse([*arguments, "--blocks", "2000"])
    stock, _, pressure = (simulate(ample, setting) for setting in ample.settings)
    assert pressure["series"] == stock["series"], "step for step stock vLLM's"
    assert pressure["ttft_s"] == stock["ttft_s"] and pressure["itl_ms"] == stock["itl_ms"]
    assert pressure["counters"]["evictions"] == 0 == stock["preemptions"]
    short = Options.parse([*arguments, "--blocks", "180"])
    stock, always, pressure = (simulate(short, setting) for setting in short.settings)
    assert stock["preemptions"] > 0 == pressure["preemptions"]
    assert pressure["counters"]["evictions_pressure"] > 0
    assert pressure["sampled_tokens"] == always["sampled_tokens"]
    assert pressure["steps"] < stock["steps"], "the same tokens in fewer steps"

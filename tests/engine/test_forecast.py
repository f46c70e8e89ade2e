"""Room that admissions leave to running requests: as much as these really come to take.

Blocks of 8, window 8, budget 40: a store of 4 blocks, as in ``test_scheduler``.
"""

from dataclasses import replace

import pytest

from tests.engine.cases import counters, engine, tokens, used_blocks
from tests.engine.harness import Setup
from tests.nightly import nightly
from vllm_kvevict.engine import memory_pressure
from vllm_kvevict.engine.blocks import EvictionCore

SYNC = Setup(interval=32, blocks=1200, max_num_seqs=12, max_batched=512)
ASYNC = replace(SYNC, asynchronous=True)
BOTH = pytest.mark.parametrize("setup", [nightly(SYNC), ASYNC], ids=["sync", "async"])


def headroom(core) -> int:
    return core.scheduler._memory.forecast.peak()


@BOTH
@pytest.mark.parametrize("second_budget", [None, 72])
def test_the_highest_point_is_forecast(setup, second_budget, monkeypatch):
    monkeypatch.setattr(memory_pressure, "FORECAST_STEPS", 1)
    # Survivors go into own blocks, as they do where the pool is short.
    monkeypatch.setattr(EvictionCore, "free_after_step", 0)
    setup = replace(setup, second_budget=second_budget)
    core = engine(setup)
    for index in range(12):
        core.add(tokens(90 + 7 * index, index), 400)
        core.step()
    core.add(tokens(100, 99), 2)
    core.step()
    core.step()
    before, after, forecasts = [], [], []
    for _ in range(100):
        before.append(used_blocks(core))
        forecasts.append(headroom(core))
        core.step(between=lambda: after.append(used_blocks(core)))
    steps = range(100 - setup.interval)
    peaks = [max(after[s : s + setup.interval]) - before[s] for s in steps]
    excess = [forecasts[s] - peaks[s] for s in steps]
    assert min(excess) >= 0 and max(excess) <= 12 * setup.groups, (forecasts, peaks)
    assert max(peaks) >= 12
    assert counters(core).evictions_decode > 30 and counters(core).postponed == 0


@BOTH
def test_who_is_let_in_is_not_preempted_again(setup, monkeypatch):
    """Answers of many intervals over a pool for a third of the requests."""
    results = {}
    for room in (True, False):
        if not room:
            monkeypatch.setattr(memory_pressure.Forecast, "peak", lambda _: 0)
        core = engine(replace(setup, blocks=120, max_num_seqs=32, max_batched=64))
        for index in range(40):
            core.add(tokens(50 + index % 20, index), 180 + 3 * index)
        core.finish()
        results[room] = core.invariants.tally.preemptions, core.steps
        assert counters(core).evictions_decode > 50
    assert results[True][0] <= results[False][0] // 3, results
    assert results[True][1] <= 1.1 * results[False][1], results


@BOTH
def test_nothing_is_kept_free_where_nobody_waits_or_evicts(setup):
    core = engine(setup)
    for index in range(12):
        core.add(tokens(100, index), 100)
    for _ in range(3):
        core.step()
    assert headroom(core) == 0, "nobody waits"
    core.add(tokens(100, 99), 2)
    assert headroom(core) > 0
    sharers = engine(setup)
    for _ in range(13):
        sharers.add(tokens(100), 100)
    for _ in range(20):
        sharers.step()
        assert headroom(sharers) == 0, "they give nothing back"
    assert counters(sharers).skipped_shared > 0


def admitted_at(core, request) -> int:
    """Steps until a request is scheduled."""
    for step in range(1, 1000):
        if request.request_id in core.step().num_scheduled_tokens:
            return step
    raise AssertionError("it is never admitted")


@BOTH
def test_a_prompt_is_admitted_by_what_it_leaves_behind(setup, monkeypatch):
    """The room for running requests and the blocks that a prompt gives back are not both left
    free: a prompt of 50 blocks keeps 4, so the others have its room when they come to need it."""
    setup = replace(setup, blocks=400)
    waited, preempted = {}, {}
    for counts in (True, False):
        if not counts:
            monkeypatch.setattr(memory_pressure.Forecast, "peak_with", lambda self, *_: self.last)
        core = engine(setup)
        for index in range(8):
            core.add(tokens(90, index), 300)
        for _ in range(12):
            core.step()
        late = core.add(tokens(400, 99), 100)
        room = headroom(core)
        assert room >= 16
        # The prompt, and less than what the others take until they evict.
        core.hold(50 + room // 2)
        waited[counts] = admitted_at(core, late)
        while core.scheduler.requests:
            core.step()
        core.release()
        core.finish()
        preempted[counts] = core.invariants.tally.preemptions
        assert counters(core).evictions_prefill >= 9 and counters(core).evictions_decode > 0
    assert waited[True] == 1 < waited[False], waited
    assert preempted == {True: 0, False: 0}


@BOTH
def test_a_prompt_that_returns_nothing_leaves_room_for_the_peak(setup):
    """One that never evicts, one whose blocks others hold, and one that is computed for longer than
    an interval."""
    core = engine(replace(setup, blocks=400, max_num_seqs=6, max_batched=64))
    for index in range(6):
        core.add(tokens(90, index), 400)
        core.step()
    waiting = [core.add(tokens(length, length), 2) for length in (20, 400, 2400)]
    core.step()
    forecast = core.scheduler._memory.forecast
    short, one, long = (core.scheduler._table.states[r.request_id] for r in waiting)
    assert forecast.peak_with(one, 0, {}) < forecast.last
    # Its store takes 4 blocks, and its window and what fills a block are not evicted.
    assert forecast.peak_with(one, 0, {0: 47}) == forecast.last > 0
    assert forecast.peak_with(short, 0, {}) == forecast.last
    assert forecast.peak_with(long, 0, {}) == forecast.last
    assert forecast.peak_with(long, 2300, {}) < forecast.last, "most of it is in the cache"

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

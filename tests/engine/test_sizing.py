"""What the sizing command promises, kept by vLLM's own scheduler."""

from dataclasses import replace

import pytest

from tests.engine.cases import no_stop, tokens
from tests.engine.harness import Engine, Setup
from tests.nightly import covering
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.tools.plan.footprint import EvictingGroup, Group, SharingGroup, request_footprint

PROMPT, OUTPUT = 200, 60
SETUP = Setup(budget=64, interval=24, blocks=128, max_num_seqs=32, max_batched=256, caching=False)

SCHEDULERS = [pytest.param(False, id="sync"), pytest.param(True, id="async")]


def planned(setup: Setup):
    config = EvictionConfig(
        policy="snapkv", budget=setup.budget, window=setup.window, interval=setup.interval
    )
    group = EvictingGroup(config.rule(setup.block_size), PROMPT)
    return request_footprint([group], PROMPT, OUTPUT)


def run(setup: Setup, asked=None) -> tuple[int, int]:
    """Serve many requests; returns the most that decoded at once, and preemptions."""
    core = Engine(setup, no_stop)
    for seed in range(60):
        core.add(tokens(PROMPT, seed), OUTPUT, asked=asked)
    peak = 0
    while core.scheduler.has_unfinished_requests():
        core.step()
        peak = max(peak, sum(not r.is_prefill_chunk for r in core.scheduler.running))
        assert core.steps < 5000
    core.settle()
    assert core.scheduler.eviction_counters.evictions >= (0 if asked else 60)
    return peak, sum(request.num_preemptions for request in core.requests)


@pytest.mark.parametrize(
    ("rule", "asynchronous"),
    covering([dict(), dict(interval=0), dict(budget="50%"), dict(budget=40)], SCHEDULERS),
)
def test_planned_sequences_run_without_preemption(asynchronous, rule):
    setup = replace(SETUP, asynchronous=asynchronous, **rule)
    sequences = planned(setup).sequences(setup.blocks - 1)
    assert 3 < sequences < setup.max_num_seqs
    assert run(replace(setup, max_num_seqs=sequences)) == (sequences, 0)


@pytest.mark.parametrize(
    ("rule", "asynchronous", "shared"),
    covering([dict(), dict(interval=0), dict(budget="50%")], SCHEDULERS[::-1], ["keep", "evict"]),
)
def test_planned_sequences_over_one_context(asynchronous, rule, shared):
    """Each holds what it asks and says, and the context's store is held once."""
    context, question, output = 200, 30, 60
    setup = replace(SETUP, caching=True, asynchronous=asynchronous, shared=shared, **rule)
    config = EvictionConfig(
        policy="snapkv", budget=setup.budget, window=setup.window, interval=setup.interval
    )
    rule = config.rule(setup.block_size)
    group = SharingGroup(rule, context + question, context, shared == "evict")
    sequences = request_footprint([group], context + question, output).sequences(
        setup.blocks - 1 - group.shared
    )
    own = shared == "evict" and setup.interval > 0  # Each ends with a store of its own.
    assert sequences > (3 if own else planned(setup).sequences(setup.blocks - 1))
    assert sequences <= setup.max_num_seqs
    core = Engine(replace(setup, max_num_seqs=sequences), no_stop)
    for seed in range(60):
        asked = {"kv_eviction_at": context}
        core.add(tokens(context) + tokens(question, seed), output, asked=asked)
    peak = 0
    while core.scheduler.has_unfinished_requests():
        core.step()
        peak = max(peak, len(core.scheduler.running))
    core.settle()
    assert peak == sequences
    # Where nobody holds it any more, it leaves with the next request that needs blocks.
    taken = core.scheduler.eviction_counters.stores_reused
    assert taken > 40 if own else taken == 59
    assert sum(request.num_preemptions for request in core.requests) == 0


def test_planned_sequences_without_eviction():
    sequences = request_footprint([Group(SETUP.block_size)], PROMPT, OUTPUT).sequences(
        SETUP.blocks - 1
    )
    asked = {"kv_eviction": "none"}
    assert run(replace(SETUP, max_num_seqs=sequences), asked) == (sequences, 0)
    _, preemptions = run(replace(SETUP, max_num_seqs=sequences + 1), asked)
    assert preemptions > 0, "one more does not fit"

"""Slots that a drafter's layers take beyond the tokens of a step."""

from dataclasses import replace

import pytest

from tests.engine.cases import SYNC, engine, tokens
from tests.engine.test_in_place import check_sharer
from vllm_kvevict.engine.memory_pressure import Forecast

DRAFTS = 1


def with_slots(setup):
    core = engine(setup)
    core.scheduler.num_lookahead_tokens = DRAFTS
    return core


def test_an_admission_counts_the_store_where_slots_go_beyond_the_prompt(monkeypatch):
    """The prompt's eviction is due where its tokens end, not where its slots do."""
    monkeypatch.setattr(Forecast, "peak", lambda _: 0)
    core = with_slots(replace(SYNC, max_batched=512, shared="evict", reserve_full=False))
    first = core.add(tokens(100), 70)
    core.step()
    core.settle()
    check_sharer(core, first)


@pytest.mark.parametrize("shared", ["keep", "evict"])
@pytest.mark.parametrize("caching", [True, False])
def test_blocks_of_slots_come_back(shared, caching):
    core = with_slots(replace(SYNC, shared=shared, caching=caching))
    free = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for seed, length in enumerate((103, 64, 150, 31)):
        core.add(tokens(length, seed % 2), 90)
    core.finish()
    assert core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert core.scheduler.eviction_counters.evictions_decode >= 4


@pytest.mark.parametrize(
    "options", [{}, dict(prefill_interval=32), dict(pyramid=3, budget=80, beta=4.0)], ids=str
)
def test_nothing_is_reserved_where_nothing_is_cached(options):
    """So an admission need not say where its step ends: at its tokens, or behind its slots."""
    core = with_slots(replace(SYNC, shared="evict", caching=False, **options))
    table, due = core.scheduler._table, 0
    admit = table.admit

    def admitted(state):
        nonlocal due
        admit(state)
        for group, timeline in state.timelines.items():
            manager = core.scheduler._evicting[group]
            ends = range(1, state.request.num_tokens + DRAFTS + 1)
            due += sum(map(timeline.is_due, ends))
            assert not any(manager._reservation(state, end) for end in ends)

    table.admit = admitted
    for seed, length in enumerate((103, 64, 150, 31, 150)):
        core.add(tokens(length, seed % 2), 90)
    core.finish()
    assert due > 0

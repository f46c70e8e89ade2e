"""Drafts: slots that a drafter's layers take beyond the tokens of a step, and padded drafts."""

from dataclasses import replace
from typing import Any

import pytest
from vllm.config import SpeculativeConfig

from benchmarks import bare_scheduler
from tests.engine.cases import SYNC, engine, evictions, hit, tokens
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
        for group, progress in state.progress.items():
            manager = core.scheduler._evicting[group]
            ends = range(1, state.request.num_tokens + DRAFTS + 1)
            due += sum(map(progress.is_due, ends))
            assert not any(manager._reservation(state, end) for end in ends)

    table.admit = admitted
    for seed, length in enumerate((103, 64, 150, 31, 150)):
        core.add(tokens(length, seed % 2), 90)
    core.finish()
    assert due > 0


def with_drafts(drafts: int) -> Any:
    """The configuration of a server that drafts by n-grams."""
    make = bare_scheduler.vllm_config

    def vllm_config(setup: Any) -> Any:
        config = make(setup)
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=drafts,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        return config

    return vllm_config


@pytest.mark.parametrize("policy", ["snapkv", "streaming-llm"])
@pytest.mark.parametrize("length", [105, 113])
def test_padded_drafts_do_not_reach_across_the_next_eviction(policy, length, monkeypatch):
    """A user who repeats a prompt word by word gets an answer over other tokens than the first one.

    Where all of a prompt but one token is found, vLLM pads the step with drafts, which nobody had
    counted: they are rejected, and the step has evicted as if they were the request's.
    """
    setup = replace(SYNC, window=4, interval=16, max_batched=512, shared="evict")
    monkeypatch.setattr(bare_scheduler, "vllm_config", with_drafts(6))
    core = engine(setup)
    about = {"kv_eviction_at": 100, "kv_eviction": policy, "kv_eviction_interval": 16}
    core.add(tokens(length), 2, asked=about)
    core.schedule()
    core.settle()
    for _ in range(3):
        core.step()
    assert not core.scheduler.has_unfinished_requests()
    second = core.add(tokens(length), 100, asked=about)
    output = core.scheduler.schedule()
    start = hit(output, second)
    assert start >= 100
    due, end = 100 + 16, start + output.num_scheduled_tokens[second.request_id]
    # A rejected draft leaves its query in the ring: no step reaches from before the window into it.
    assert end <= due - setup.window or start >= due - setup.window, (start, end)
    assert end < due or start + 1 >= due, (start, end)
    assert not evictions(output) or end == length

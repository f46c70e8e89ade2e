"""Directed cases of contexts that the engine prepares for the requests that ask for it.

Setup as in ``test_sharing``: blocks of 8, window 8, budget 40, an eviction point at 100 of 130.
"""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from benchmarks.bare_scheduler import make_request
from tests.engine.harness import Engine
from tests.engine.test_scheduler import (
    BOTH,
    SYNC,
    counters,
    engine,
    evictions,
    no_stop,
    tokens,
    used_blocks,
)
from tests.engine.test_sharing import AT_100, ask
from vllm_kvevict.engine.preparing import MOST_UNDER_WAY
from vllm_kvevict.settings.requests import RequestOptions

PROXY = {"kv_eviction_prepare": tokens(12, seed=7)}
LONG = {"kv_eviction_prepare": tokens(103, seed=8)}
EITHER = pytest.mark.parametrize("prepare, length", [(PROXY, 112), (LONG, 203)])


def run(core, steps=20):
    """Evictions of the next steps, by request."""
    found = {}
    for _ in range(steps):
        found |= evictions(core.step())
    return found


@BOTH
@EITHER
@pytest.mark.parametrize("shared", ["keep", "evict"])
@pytest.mark.parametrize("batched", [40, 512])
def test_what_reads_the_context_vanishes(setup, prepare, length, shared, batched):
    core = engine(replace(setup, blocks=64, max_batched=batched, shared=shared))
    first = ask(core, 1, 40, asked=prepare)
    assert run(core) == {f"{first.request_id}-prepare-1": length}
    assert core.invariants.tally.preparations == 1
    assert counters(core).stores_published == counters(core).stores_reused == 1
    assert counters(core).tokens_reused == 100
    own = (first.num_computed_tokens + 7) // 8 - 100 // 8
    assert used_blocks(core) == 4 + 1 + own, "the store, what lies behind it, and its own blocks"
    others = [ask(core, seed, 20, asked=prepare) for seed in (2, 3)]
    core.finish()
    assert counters(core).preparations == 1 and counters(core).preparations_failed == 0
    assert counters(core).stores_reused == 1 + len(others)


@BOTH
def test_requests_wait_for_one_preparation(setup):
    core = engine(replace(setup, max_batched=40))
    asked = [ask(core, seed, asked=PROXY) for seed in range(4)]
    while not evictions(output := core.step()):
        assert not {r.request_id for r in asked} & output.num_scheduled_tokens.keys()
    core.finish()
    assert counters(core).preparations == 1 and counters(core).stores_reused == len(asked)


@BOTH
def test_preparations_do_not_meet(setup):
    core = engine(replace(setup, max_batched=512))
    for index, asked in enumerate([PROXY, LONG, {}, PROXY]):
        ask(core, index, 200, asked=asked)
        run(core, 6)
    ask(core, 9, 200, asked=PROXY, cache_salt="another tenant")
    run(core, 6)
    assert counters(core).preparations == 3 and counters(core).evictions_prefill == 4
    assert counters(core).stores_reused == 4
    core.finish()


@BOTH
def test_a_preparation_ends_with_the_last_request_that_asked(setup):
    core = engine(replace(setup, max_batched=40))
    first, second = (ask(core, seed, asked=PROXY) for seed in (1, 2))
    core.step()
    core.abort(first)
    core.step()
    assert len(core.scheduler.requests) == 2, "another request waits for it"
    core.abort(second)
    core.step()
    assert not core.scheduler.requests and counters(core).stores_published == 0
    core.finish()
    third = ask(core, 3, asked=PROXY)
    core.finish()
    assert third.num_output_tokens == 20
    assert counters(core).preparations == 2 and counters(core).stores_reused == 1


@BOTH
def test_a_preparation_larger_than_the_pool_is_not_begun(setup):
    """Its context alone fits; with what reads it, it would head the queue for ever."""
    core = engine(replace(setup, max_batched=512, blocks=24))
    asked = ask(core, 1, 8, asked=LONG)
    other = core.add(tokens(30, seed=6), 8)
    core.finish()
    assert asked.num_output_tokens == other.num_output_tokens == 8
    assert counters(core).preparations == 0 and counters(core).preparations_failed == 1
    assert counters(core).evictions_prefill == 1


@BOTH
def test_so_many_contexts_are_prepared_at_once(setup):
    core = engine(replace(setup, blocks=1200, max_batched=512, max_num_seqs=64))
    for seed in range(20):
        core.add(tokens(130, 50 + seed), 4, asked=PROXY | {"kv_eviction_at": 100})
    core.step()
    assert counters(core).preparations == MOST_UNDER_WAY
    core.finish()
    assert counters(core).preparations == counters(core).stores_reused == 20
    assert counters(core).tokens_prepared == 20 * 112


@BOTH
def test_a_store_that_was_lost_is_prepared_anew(setup):
    core = engine(replace(setup, max_batched=512))
    ask(core, 1, asked=PROXY)
    core.finish()
    core.reset()
    ask(core, 2, asked=PROXY)
    core.finish()
    assert counters(core).preparations == 2 and counters(core).stores_reused == 2


@BOTH
@pytest.mark.parametrize("held", [0, 10])
def test_preempted_preparations_begin_again(setup, held):
    """The pool is short while it reads, and for a while afterwards."""
    core = engine(replace(setup, max_batched=40, blocks=40))
    other = core.add(tokens(60, seed=5), 150, asked={"kv_eviction": "none"})
    core.step()
    ask(core, 1, 60, asked=LONG)
    core.step()
    core.hold(free=held)
    for _ in range(6):
        core.step()
    core.release()
    core.finish()
    assert other.num_output_tokens == 150
    assert counters(core).stores_reused >= 1 and core.invariants.tally.preparations == 1


@BOTH
@EITHER
def test_each_group_prepares_what_it_keeps(setup, prepare, length):
    core = engine(replace(setup, second_budget=80, blocks=128, max_batched=512))
    for seed in (1, 2):
        ask(core, seed, 100, asked=prepare)
    found = run(core, 8)
    assert list(found.values()) == [length]
    assert counters(core).stores_reused == 2
    core.finish()


def test_a_context_too_short_to_evict_is_not_prepared():
    core = engine(replace(SYNC, max_batched=512))
    core.add(tokens(60), 10, asked=PROXY | {"kv_eviction_at": 40})
    core.finish()
    assert counters(core).preparations == counters(core).preparations_failed == 0


@pytest.mark.parametrize(
    "change, asked",
    [(dict(caching=False), {}), (dict(sliding_window=16), {}), (dict(blocks=26), LONG)],
    ids=["no prefix caching", "layers that do not evict", "longer than the model"],
)
def test_requests_go_on_where_nothing_can_be_prepared(change, asked):
    core = engine(replace(SYNC, max_batched=512, **change))
    ask(core, 1, asked=PROXY | asked)
    core.finish()
    assert counters(core).preparations == 0 and counters(core).preparations_failed == 1
    assert counters(core).evictions_prefill == 1, "it evicts at its point by itself"
    assert counters(core).stores_published == 0, "which others must not take for a prepared one"


@BOTH
def test_what_prepares_is_no_request_of_a_client(setup):
    """A dashboard counted two requests for one, and two shares that were kept."""
    core = Engine(replace(setup, max_batched=512), no_stop, log_stats=True)
    core.scheduler._reporter.kept = kept = Mock()
    ask(core, 1, asked=PROXY)
    core.finish()
    assert counters(core).preparations == 1 == kept.call_count
    assert counters(core).requests_evicted + counters(core).requests_whole == 1


@pytest.mark.parametrize("beside", ["mm_features", "prompt_embeds"])
def test_a_prompt_of_more_than_text_is_not_prepared(beside):
    """What prepares it has the token ids alone: its store would stand for an image it never saw."""
    core = engine(SYNC)
    request = make_request(core.setup, "r", tokens(130), 4, asked=AT_100 | PROXY)
    assert core.scheduler._options(request).prepare
    setattr(request, beside, [object()])
    assert core.scheduler._options(request) == RequestOptions("snapkv")

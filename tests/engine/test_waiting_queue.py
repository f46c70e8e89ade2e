"""Requests that wait for a store: a step examines none of them, and none is forgotten."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.cases import ASYNC, SYNC, counters, engine, tokens

ONCE = {"kv_eviction_at": 100, "kv_eviction_interval": 0}
NEVER = {"kv_eviction": "none"}
DOCUMENT = tokens(100)
SETUPS = [
    replace(setup, blocks=200, max_batched=256, long_prefill=16, priority=priority)
    for setup in (SYNC, ASYNC)
    for priority in (False, True)
]
ALL = pytest.mark.parametrize(
    "setup", SETUPS, ids=["sync", "sync priority", "async", "async priority"]
)


def waiting(core: Any, count: int, document: list[int] = DOCUMENT) -> list[Any]:
    """Requests with one document, the first of which computes it while the others wait."""
    asked = [core.add(document + tokens(10, seed), 4, asked=ONCE) for seed in range(1, count + 1)]
    core.step()
    assert asked[0].num_computed_tokens == 16
    assert core.scheduler.get_request_counts() == (1, count - 1)
    return asked


def calls(core: Any) -> Counter[str]:
    """Count the waiting requests that each of the next steps examines."""
    seen: Counter[str] = Counter()
    stores = core.scheduler._stores
    waits = stores.waits

    def counted(state: Any) -> bool:
        seen[state.request_id] += 1
        return waits(state)

    stores.waits = counted
    return seen


@ALL
def test_a_step_examines_nobody_who_waits_for_a_store(setup):
    core = engine(setup)
    asked = waiting(core, 40)
    seen = calls(core)
    core.step()
    assert seen.total() == 0
    late = core.add(DOCUMENT + tokens(10, 99), 4, asked=ONCE)
    core.step()
    core.step()
    assert seen[late.request_id] == 1 == seen.total()
    core.finish()
    assert counters(core).evictions == 1 and counters(core).stores_reused == 40
    assert all(request.num_output_tokens == 4 for request in [*asked, late])


@ALL
def test_others_pass_and_the_order_stays(setup):
    core = engine(replace(setup, max_num_seqs=3))
    asked = waiting(core, 5)
    other = core.add(tokens(30, 50), 40, asked=NEVER)
    core.step()
    assert other.num_computed_tokens == 16, "it does not wait for them"
    last = [core.add(tokens(30, seed), 4, asked=NEVER) for seed in (51, 52)]
    begun: list[Any] = []
    while core.scheduler.has_unfinished_requests():
        output = core.step()
        begun += [new.req_id for new in output.scheduled_new_reqs]
    core.settle()
    # The first of the late ones came while one sequence was free, all others in their order.
    expected = [request.request_id for request in (last[0], *asked[1:], last[1])]
    assert begun == expected
    core.finish()


@ALL
def test_those_that_wait_can_leave(setup):
    core = engine(setup)
    asked = waiting(core, 6)
    for request in (asked[3], asked[1]):
        core.abort(request)
    assert core.scheduler.get_request_counts() == (1, 3)
    # The one that computes the document leaves: the next one computes it.
    core.abort(asked[0])
    core.step()
    core.step()
    assert asked[2].num_computed_tokens > 0 and asked[4].num_computed_tokens == 0
    core.finish()
    assert counters(core).evictions == 1 and counters(core).stores_reused == 2
    # All of them leave.
    waiting(core, 4, tokens(100, 60))
    core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert core.scheduler.get_request_counts() == (0, 0)
    core.finish()
    assert not core.scheduler._waiting_queue._aside


@ALL
def test_a_reset_lets_the_next_one_compute_the_document(setup):
    core = engine(setup)
    asked = waiting(core, 4)
    core.reset()
    assert core.scheduler.get_request_counts() == (0, 4)
    core.finish()
    assert all(request.num_output_tokens == 4 for request in asked)
    assert counters(core).evictions == 1 and counters(core).stores_reused == 3


@pytest.mark.parametrize("setup", SETUPS[::2], ids=["sync", "async"])
def test_a_clock_that_is_set_back_changes_no_order(setup):
    """The times of arrival are those of API servers."""
    core = engine(setup)
    asked = [
        core.add(DOCUMENT + tokens(10, seed), 4, asked=ONCE, arrival_time=arrival)
        for seed, arrival in enumerate((100.0, 101.0, 50.0, 102.0, 40.0))
    ]
    admitted: list[str] = []
    while core.scheduler.has_unfinished_requests():
        admitted += [new.req_id for new in core.step().scheduled_new_reqs]
    core.finish()
    assert counters(core).stores_reused == 4
    assert admitted == [request.request_id for request in asked]

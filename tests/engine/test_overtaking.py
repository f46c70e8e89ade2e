"""Requests whose context is there go ahead of whole prompts, and starve nobody."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from tests.engine.harness import Engine, Setup
from tests.engine.test_offload import lose
from vllm_kvevict.tiers.overtaking import MOST

POINT = 180
SETUP = Setup(
    budget=40, window=8, interval=16, blocks=40, block_size=8, max_batched=512, memory=10**9
)
BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def document(number: int) -> list[int]:
    return [2 + (number * 131 + i * i) % 900 for i in range(POINT)]


def ask(engine: Engine, number: int, question: int, max_tokens: int = 4, **options: Any) -> Any:
    prompt = [*document(number), *range(3 + question, 11 + question)]
    return engine.add(prompt, max_tokens, asked={"kv_eviction_at": POINT}, **options)


def started(setup: Setup, known: int = 3) -> Engine:
    """A server whose KV cache lost the stores of so many documents, and that computes a prompt."""
    engine = Engine(setup, lambda request_id, tokens: 5)
    for number in range(known):
        ask(engine, number, 0)
        engine.finish()
    lose(engine)
    ask(engine, 90, 0, 30)
    engine.step()
    engine.step()
    return engine


def order(engine: Engine) -> list[list[str]]:
    """Ids by the step that first admits them, until all have ended."""
    found = []
    while engine.scheduler.has_unfinished_requests():
        new = [one.req_id for one in engine.step().scheduled_new_reqs]
        found += [new] if new else []
    engine.finish()
    return found


@BOTH
@pytest.mark.parametrize("salt", [None, "another tenant"])
def test_it_goes_ahead_and_alone(asynchronous: bool, salt: str | None) -> None:
    engine = started(replace(SETUP, asynchronous=asynchronous, blocks=90))
    prompts = [ask(engine, 91 + i, 0).request_id for i in range(2)]
    late = ask(engine, 1, 7, cache_salt=salt).request_id
    found = order(engine)
    if salt is None:
        assert found[0] == [late] and prompts[0] in found[1]
        assert [one for step in found[1:] for one in step] == prompts
        assert engine.scheduler.eviction_counters.stores_restored_memory == 1
    else:
        assert [one for step in found for one in step] == [*prompts, late]


@pytest.mark.parametrize("other", [dict(priority=True), dict(memory=0)], ids=str)
def test_the_order_is_vllms(other: dict[str, Any]) -> None:
    """Where clients set it, and without stores outside the KV cache."""
    engine = started(replace(SETUP, **other))
    asked = [ask(engine, 91, 0).request_id, ask(engine, 1, 7).request_id]
    assert [one for step in order(engine) for one in step] == asked


def test_it_waits_where_its_blocks_are_not_there() -> None:
    engine = started(SETUP)
    engine.hold(free=5)
    prompt, late = ask(engine, 91, 0), ask(engine, 1, 7)
    engine.step()
    assert list(engine.scheduler.waiting) == [prompt, late] and not prompt.num_computed_tokens
    engine.release()
    assert order(engine)[0] == [late.request_id]


def test_a_request_that_may_not_reuse_a_store_waits() -> None:
    engine = started(SETUP)
    prompt, late = ask(engine, 91, 0), ask(engine, 1, 7)
    late.skip_reading_prefix_cache = True
    assert order(engine)[0][0] == prompt.request_id


def test_a_prompt_is_overtaken_so_often() -> None:
    engine = started(SETUP)
    prompt = ask(engine, 91, 0).request_id
    late = [ask(engine, i % 3, 7 + i).request_id for i in range(2 * MOST)]
    found = [one for step in order(engine) for one in step]
    assert found.index(prompt) == MOST
    assert [one for one in found if one != prompt] == late


def test_those_that_go_ahead_keep_their_order() -> None:
    """Also where the step has no tokens left for them: a prompt takes all."""
    engine = started(replace(SETUP, max_batched=16, blocks=90))
    (prompt,) = engine.scheduler.running
    late = [ask(engine, 92, 0).request_id]
    for number in range(3):
        late.insert(number, ask(engine, number, 7).request_id)
        engine.step()
    assert prompt.num_computed_tokens < POINT and engine.scheduler.running == [prompt]
    assert [one for step in order(engine) for one in step] == late


def test_a_preempted_request_comes_first() -> None:
    engine = started(SETUP)
    (running,) = engine.scheduler.running
    engine.hold(free=0)
    while not running.num_preemptions:
        engine.step()
    engine.release()
    engine.scheduler.max_num_active_reqs = 1
    late = ask(engine, 1, 7)
    engine.step()
    assert engine.scheduler.running == [running] and late in engine.scheduler.waiting
    engine.finish()


def test_a_prompt_is_overtaken_by_less_than_itself() -> None:
    """A short prompt waited for what followed the points of others, however long that was."""
    engine = started(replace(SETUP, blocks=140, max_batched=64))
    prompt = engine.add(list(range(5, 45)), 4)
    late = [
        engine.add([*document(n), *range(3, 3 + rest)], 4, asked={"kv_eviction_at": POINT})
        for n, rest in enumerate([200, 40, 39])
    ]
    first, second, *_ = order(engine)
    assert first == [late[2].request_id] and second[0] == prompt.request_id


@BOTH
@pytest.mark.parametrize("aborted", [False, True])
def test_a_request_that_vllm_loads_for_stays_where_it_is(asynchronous: bool, aborted: bool) -> None:
    """The engine ended: it was in the queue a second time, when its blocks were loaded or gone."""
    setup = dict(budget=160, blocks=90, offload=600, asynchronous=asynchronous)
    engine = Engine(replace(SETUP, **setup), lambda request_id, tokens: 5)
    whole = {"kv_eviction": "none"}
    for asked in (whole, {"kv_eviction_at": POINT}):
        engine.add([*document(1), *range(3, 11)], 2, asked=asked)
        engine.finish()
        for _ in range(8):
            engine.step()
        engine.settle()
        lose(engine)
    running = engine.add([*document(1)[:96], *range(500, 520)], 150, asked=whole)
    while not running.num_output_tokens:
        engine.step()
    engine.settle()
    offload = engine.worker.offload
    assert offload is not None
    rng, offload._rng = offload._rng, Slow()
    engine.hold(free=15)
    loading = ask(engine, 1, 7)
    engine.step()
    assert loading.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.release()
    prompt = ask(engine, 7, 0)
    if aborted:
        engine.abort(loading)
    engine.step()
    assert loading not in engine.scheduler.waiting and prompt.num_computed_tokens
    assert list(engine.scheduler.kv_holding_waiting) == [loading] * (not aborted)
    offload._rng = rng
    for job in [*offload._loads, *offload._stores]:
        job[2] = 0
    engine.finish()


class Slow(Random):
    """Transfers that take for ever."""

    def randrange(self, *args: Any) -> int:
        return 10**6


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    asynchronous=st.booleans(),
    blocks=st.integers(28, 60),
    seqs=st.integers(1, 6),
    events=st.lists(
        st.tuples(st.sampled_from(["new", "known", "known"]), st.integers(0, 3)), max_size=60
    ),
)
def test_nobody_starves(
    asynchronous: bool, blocks: int, seqs: int, events: list[tuple[str, int]]
) -> None:
    """By the order of first admissions, whatever arrives when."""
    setup = replace(SETUP, asynchronous=asynchronous, blocks=blocks, max_num_seqs=seqs)
    engine = started(setup)
    before: dict[str, int] = {}
    passed: dict[str, int] = {}
    arrived: list[str] = []

    def step() -> None:
        for one in engine.step().scheduled_new_reqs:
            if one.req_id in passed:
                for earlier in arrived[: arrived.index(one.req_id)]:
                    passed[earlier] += 1
                arrived.remove(one.req_id)

    for number, (kind, steps) in enumerate(events):
        about = number % 3 if kind == "known" else 100 + number
        request_id = ask(engine, about, number % 700).request_id
        before[request_id], passed[request_id] = len(arrived), 0
        arrived.append(request_id)
        for _ in range(steps):
            step()
    while arrived:
        step()
    engine.finish()
    for request_id, times in passed.items():
        assert times <= MOST * (before[request_id] + 1), f"{request_id} was overtaken {times} times"

"""An engine that serves for days: whatever it notes about a request, a block or a store goes again.

Every container that the eviction's objects lead to is measured, whatever it is called.
"""

import random
import weakref
from collections import deque
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from benchmarks.bare_scheduler import VOCABULARY, Setup, make_request, make_scheduler
from tests.engine.cases import SYNC, tokens
from vllm_kvevict.engine import stores

LIVE = 24
"""Requests that are alive at once."""

KEPT = 256
"""Entries that the engine may remember of requests that are gone: the longest list it has."""


@pytest.fixture(autouse=True)
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is otherwise too high for a test to reach."""
    monkeypatch.setattr(stores, "MAX_NAMES", KEPT)


SETUPS = {
    "always": replace(SYNC, interval=16, max_batched=256),
    "shared": replace(SYNC, interval=16, max_batched=256, shared="evict", second_budget=24),
    "pressure": replace(SYNC, interval=16, max_batched=256, when="pressure", marks=(0.3, 0.6)),
    "inside": replace(SYNC, interval=16, max_batched=256, prefill_interval=32, longest=400),
    "audited": replace(SYNC, interval=32, max_batched=256, audit=1.0, priority=True),
    "tiers": replace(SYNC, interval=16, max_batched=256, memory=1 << 16),
}


def sizes(scheduler: Any) -> dict[str, int]:
    """Entries of all containers below the attributes that the package gave a scheduler.

    Values of one attribute of all objects of a class are added up.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    stack = [(name, value) for name, value in vars(scheduler).items() if ours(value)]
    while stack:
        name, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, set, frozenset, tuple, deque)):
            found[name] = found.get(name, 0) + len(value)
            entries = value.values() if isinstance(value, dict) else value
            keys = list(value) if isinstance(value, dict) else []
            stack += [(name, one) for one in [*keys, *entries]]
        elif type(value).__module__.startswith("vllm_kvevict"):
            kind = type(value).__name__
            inside = getattr(value, "__dict__", {})
            stack += [(f"{kind}.{attribute}", one) for attribute, one in inside.items()]
    return found


def ours(value: Any) -> bool:
    return type(value).__module__.startswith("vllm_kvevict")


class Days:
    """Random requests of all kinds, one after the other, until many have been served."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.rng = setup, random.Random(seed)
        self.scheduler = make_scheduler(setup, log_stats=True)
        self.live: dict[str, Request] = {}
        self.gone: list[Any] = []
        """Weak references to requests and to what the engine knew of them."""
        self.names = count()

    def add(self, length: int, answer: int, **asked: Any) -> None:
        rng = self.rng
        shared = tokens(rng.randrange(length), rng.randrange(12))
        prompt = shared + [rng.randrange(2, VOCABULARY) for _ in range(length - len(shared))]
        given = {f"kv_eviction_{key}": value for key, value in asked.items()}
        name = f"r{next(self.names)}"
        request = make_request(self.setup, name, prompt, answer, asked=given)
        self.scheduler.add_request(request)
        self.live[name] = request
        self.gone += map(weakref.ref, (request, self.scheduler._table.states[name]))

    def any_request(self) -> None:
        rng = self.rng
        length, asked = rng.randint(4, 150), {}
        if rng.random() < 0.4:
            asked["at"] = rng.randint(1, length)
        if rng.random() < 0.2:
            asked["protect_first"] = rng.randint(1, 40)
        answer = rng.randint(1, 40)
        if rng.random() < 0.3:
            asked["interval"] = rng.choice([0, 8])
        elif rng.random() < 0.2:
            # Far from its next eviction when it is aborted.
            asked["interval"], answer = 200, 300
        self.add(length, answer, **asked)

    def step(self) -> None:
        output = self.scheduler.schedule()
        requests, sampled = self.scheduler.requests, []
        for name in output.num_scheduled_tokens:
            ready = requests[name].num_computed_tokens >= requests[name].num_tokens
            sampled.append([self.rng.randrange(2, VOCABULARY)] if ready else [])
        names = list(output.num_scheduled_tokens)
        index = {name: place for place, name in enumerate(names)}
        done = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)
        self.scheduler.update_from_output(output, done)
        self.live = {name: one for name, one in self.live.items() if name in requests}

    def serve(self, requests: int) -> None:
        for _ in range(requests):
            while len(self.live) >= LIVE:
                self.step()
            self.any_request()
            if self.rng.random() < 0.25:
                name = self.rng.choice(list(self.live))
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                del self.live[name]
            if self.rng.random() < 0.4:
                self.step()

    def abort(self) -> None:
        self.scheduler.finish_requests(list(self.live), RequestStatus.FINISHED_ABORTED)

    def drain(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()
        self.live.clear()


def check(days: Days) -> None:
    """Nothing has more entries than there are blocks and requests, of which each has a few."""
    blocks = days.setup.blocks * days.setup.groups
    for name, entries in sizes(days.scheduler).items():
        assert entries <= 4 * blocks + 40 * LIVE + KEPT, f"{name} has {entries} entries"


def serve(setup: Setup, requests: int) -> None:
    days = Days(setup, seed=requests)
    for _ in range(10):
        days.serve(requests // 10)
        check(days)
    # Some of them were to evict hundreds of steps later.
    days.abort()
    days.drain()
    # What is forgotten when a step begins.
    days.add(5, 3)
    days.drain()
    counters = days.scheduler.eviction_counters
    assert counters.evictions > requests / 10
    states = days.scheduler._table.states
    assert not states, f"states of {list(states)}"
    alive = [one() for one in days.gone if one() is not None]
    # The last request is in the hands of vLLM's scheduler until the next one comes.
    assert len(alive) <= 2, f"{len(alive)} of {len(days.gone)}"
    assert days.scheduler.reset_prefix_cache()
    for _ in range(80):
        days.add(5, 3)
        days.drain()
    left = sizes(days.scheduler)
    grown = {name: entries for name, entries in left.items() if entries > KEPT}
    assert not grown, grown


@pytest.mark.parametrize("kind", SETUPS)
def test_hundreds_of_requests_leave_nothing_behind(kind: str) -> None:
    serve(SETUPS[kind], 300)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SETUPS)
def test_50_000_requests_leave_nothing_behind(kind: str) -> None:
    serve(SETUPS[kind], 50_000)

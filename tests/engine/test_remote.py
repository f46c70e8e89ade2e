"""Random days of a server that loads prompts which another one has computed, and mutants."""

import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tests.engine import days
from tests.engine.cases import lose
from tests.engine.harness import Engine, Setup
from tests.engine.scenarios import Scenario, loading, run
from tests.engine.shadow import ShadowWorker
from tests.engine.wishes import Wish
from tests.versions import installed
from vllm_kvevict.engine.lost_blocks import LoadsInFlight, Trace
from vllm_kvevict.engine.offload import OffloadGuard
from vllm_kvevict.engine.remote_prefill import RemotePrefill
from vllm_kvevict.engine.scheduler import EvictingScheduler
from vllm_kvevict.rules.step_plan import STEPS_AHEAD
from vllm_kvevict.worker.failed_loads import BlocksNotLoaded

SEEN = (
    "remote_loads", "remote_failures", "filled", "evictions", "preemptions", "aborts", "resets",
    "prefix_hits", "taken", "evictions_at_point", "evictions_inside", "offload_loads",
    "saved", "unsaved", "lost", "lost_left",
)  # fmt: skip
LOST = ("lost_prefill", "lost_quiet", "lost_near", "lost_evicting", "lost_evicting_ahead",
        "lost_ahead", "unsaved_ahead")  # fmt: skip
"""Requests that a failed load ended: by phase, while an eviction of the reported step or of one
planned ahead was in flight, and those that were admitted in a step planned ahead. At last, saves
that were left out in such a step."""
WRONG = "overwritten or never computed|holds something else"
NIXL = Setup(connector="NixlConnector", blocks=80)
PROMPT = [2 + number % 700 for number in range(195)]


def play(scenario: Scenario, totals: Counter[str]) -> None:
    run(loading(scenario), totals)


def test_random_days():
    totals: Counter[str] = Counter()
    days.play_until_seen(lambda scenario: play(scenario, totals), 30, totals, SEEN)
    # Among a few days, one day whose loads nearly all fail can dominate the total.
    for number in range(days.ROUNDS, days.ROUNDS + 4):
        if totals["remote_loads"] > 5 * totals["remote_failures"]:
            break
        days.play(lambda scenario: play(scenario, totals), 12, number)
    assert totals["remote_loads"] > 5 * totals["remote_failures"] > 0


@pytest.mark.nightly
def test_many_random_days():
    """Loads fail while requests are in every phase, also in steps that were planned before the
    failure was known. ``KVEVICT_STEPS`` sets the number of steps, ``KVEVICT_SEED`` the first
    seed, so that a long run can be split. It goes on until each phase has occurred."""
    steps = int(os.environ.get("KVEVICT_STEPS", "200000"))
    totals: Counter[str] = Counter()
    missing, number = [*SEEN, *LOST], 0
    while totals["steps"] < (3 * steps if missing else steps):
        days.play(lambda scenario: play(scenario, totals), 200, number)
        number += 1
        missing = [name for name in SEEN + LOST if not totals[name]]
        print(dict(totals), flush=True)
    assert not missing, f"the load never saw any of {', '.join(missing)}"


def saves(scenario: Scenario) -> None:
    """A day on which prompts are saved by their tokens, and loads fail under async scheduling."""
    run(loading(replace(scenario, seed=scenario.seed // 8 * 8 + 3)))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, part",
    [
        ("_trace", lambda self, request_id: Trace(request_id)),
        ("leaves", lambda *_: None),
        ("depending", lambda *_: (set(), set())),
    ],
)
def test_accounting_catches_a_search_that_leaves_something_out(name, part, monkeypatch):
    monkeypatch.setattr(LoadsInFlight, name, part)
    assert days.hunt(saves, "goes on after its load failed|holds something else")


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [0, 1])
def test_accounting_catches_that_a_failed_load_is_forgotten_too_early(steps, monkeypatch):
    """With the step, or not even noticed."""
    begin = BlocksNotLoaded.begin_step

    def begin_step(self, output):
        begin(self, SimpleNamespace(**{STEPS_AHEAD: 0}))

    if steps:
        monkeypatch.setattr(BlocksNotLoaded, "begin_step", begin_step)
    else:
        monkeypatch.setattr(BlocksNotLoaded, "add", lambda *_: None)
    assert days.hunt(saves, "was computed over a lost block")


def pulls(scenario: Scenario) -> None:
    """A day on which every prompt is pulled by NIXL."""
    setup = replace(loading(scenario).setup, connector="NixlConnector", load_failure="recompute")
    run(replace(scenario, setup=setup))


def caught(message: str) -> bool:
    return days.hunt(pulls, message)


def test_accounting_catches_that_the_window_is_not_computed_again(monkeypatch):
    monkeypatch.setattr(RemotePrefill, "rewind", lambda *_: None)
    monkeypatch.setattr(RemotePrefill, "replayed", lambda *_: 0)
    assert caught("a hit covers the window|postponed at the end of prefill")


def test_accounting_catches_a_rewind_after_the_blocks_are_published(monkeypatch):
    def late(self, request):
        Scheduler._update_waiting_for_remote_kv(self, request)
        self._remote.rewind(request)

    monkeypatch.setattr(EvictingScheduler, "_update_waiting_for_remote_kv", late)
    monkeypatch.setattr(RemotePrefill, "replayed", lambda *_: 0)
    assert caught("holds something else")


def test_accounting_catches_a_shorter_load(monkeypatch):
    make = RemotePrefill.__init__

    def capped(self, core, stores, connector, name):
        make(self, core, stores, connector, name)
        match = connector.get_num_new_matched_tokens

        def get_num_new_matched_tokens(request, num_computed_tokens):
            found, is_async = match(request, num_computed_tokens)
            state = self._table.states[request.request_id]
            return min(found, max(0, state.hit_cap - num_computed_tokens)), is_async

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens

    monkeypatch.setattr(RemotePrefill, "__init__", capped)
    assert caught(WRONG)


def test_accounting_catches_a_load_for_a_request_that_starts_with_a_store(monkeypatch):
    may_load = RemotePrefill._may_load

    def loads(self, request, num_computed_tokens, is_async):
        state = self._table.states[request.request_id]
        started = state.pending_store is not None and request.num_tokens > 1
        return started or may_load(self, request, num_computed_tokens, is_async)

    monkeypatch.setattr(RemotePrefill, "_may_load", loads)
    with pytest.raises(AssertionError):
        days.play(pulls, 300)


def test_two_groups_survive_a_failed_transfer(monkeypatch):
    """vLLM's own method ends the engine core."""

    def day() -> Engine:
        engine = Engine(replace(NIXL, second_budget=64), lambda *_: 5)
        for number in range(12):
            engine.add([number + 2, *PROMPT], 9)
        engine.finish()
        assert engine.worker.remote is not None and engine.worker.remote.failures
        return engine

    engine = day()
    assert all(request.num_output_tokens == 9 for request in engine.requests)
    stock = Scheduler._handle_invalid_blocks
    monkeypatch.setattr(EvictingScheduler, "_handle_invalid_blocks", stock)
    with pytest.raises(RuntimeError, match="block-level load failures"):
        day()


@pytest.mark.nightly
def test_accounting_catches_loads_that_do_not_wait_for_evictions(monkeypatch):
    make = ShadowWorker.__init__

    def unfenced(self, *args):
        make(self, *args)
        self.fenced = False

    monkeypatch.setattr(ShadowWorker, "__init__", unfenced)
    assert caught(WRONG)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_loaded_prompt_evicts_in_its_first_step(asynchronous):
    engine = Engine(replace(NIXL, asynchronous=asynchronous), lambda *_: 5, seed=1)
    request = engine.add(PROMPT, 9)
    computed = []
    while not request.num_output_tokens:
        computed.append(engine.step().total_num_scheduled_tokens)
        engine.settle()
    # The window, which begins inside a block: blocks of 8 tokens end at 184 and 192.
    assert [count for count in computed if count] == [8]
    assert engine.scheduler.eviction_counters.evictions_prefill == 1
    engine.finish()


def test_a_load_completes_in_a_full_pool():
    """The engine core ended with "Cannot get 4 free blocks": the blocks of the eviction, which
    cannot reuse blocks that another request shares, were counted before the load and taken after
    it."""
    setup = replace(NIXL, needs_window=False, shared="evict", interval=0)
    engine = Engine(setup, lambda *_: 5)
    engine.add(PROMPT, 60, asked={"kv_eviction": "none"})
    engine.step()
    while not engine.requests[0].num_output_tokens:
        engine.step()
    loaded = engine.add([*PROMPT, *range(2, 10)], 20)
    engine.step()
    assert loaded.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.hold(1)
    while not loaded.num_output_tokens:
        engine.step()
    engine.release()
    engine.finish()
    assert loaded.num_output_tokens == 20
    assert engine.scheduler.eviction_counters.evictions > 0


def test_a_load_after_a_failed_load_needs_no_room_beside_itself():
    """A user waited for ever: the pool had no room for the request twice."""
    engine = Engine(replace(NIXL, blocks=40, offload=60), lambda *_: 5)
    engine.add(PROMPT, 30, prefilled=False)
    engine.finish()
    engine.reset()
    remote, offload = engine.worker.remote, engine.worker.offload
    assert remote is not None and offload is not None
    remote.rng.random = lambda: 0.0
    before = offload.loads
    request = engine.add(PROMPT, 9)
    engine.finish()
    assert request.num_output_tokens == 9
    assert remote.failures == 1 and offload.loads > before


def loaded_over_a_copy() -> Engine:
    """A prompt is loaded into blocks that the offload still copies, and these copies are read."""
    engine = Engine(replace(NIXL, blocks=40, offload=60, needs_window=False), lambda *_: 5)
    remote, offload = engine.worker.remote, engine.worker.offload
    assert remote is not None and offload is not None
    remote.rng.random, remote.rng.randrange = lambda: 0.5, lambda *_: 0
    offload._rng.randrange = lambda *_: 5
    engine.add(PROMPT, 1, prefilled=False)
    engine.step()
    engine.add([number + 1 for number in PROMPT], 9)
    for _ in range(12):
        engine.step()
    engine.reset()
    before = offload.loads
    engine.add(PROMPT, 9, prefilled=False)
    engine.finish()
    assert offload.loads > before and remote.loads == 1
    return engine


def test_a_load_waits_for_copies_from_its_blocks(monkeypatch):
    """vLLM 0.32 forgets them if another connector than the offload loads; 0.33 does not."""
    loaded_over_a_copy()
    monkeypatch.setattr(OffloadGuard, "_allocated", lambda self, allocated: allocated)
    forgets = pytest.raises(AssertionError, match=WRONG) if installed < (0, 33) else nullcontext()
    with forgets:
        loaded_over_a_copy()


def test_a_prompt_of_one_token_is_computed():
    engine = Engine(NIXL, lambda *_: 5)
    engine.add([7], 60)
    engine.finish()
    assert engine.worker.remote is not None and engine.worker.remote.loads == 0


@pytest.mark.parametrize("connector", ["NixlConnector", "DecodeBenchConnector"])
def test_what_another_server_reads_is_never_evicted(connector):
    """A client of the engine core asks for more than the one token that the front end allows."""
    engine = Engine(replace(NIXL, connector=connector), lambda *_: 5)
    handed = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    request = engine.add(PROMPT, 60, asked=handed, prefilled=False)
    while not request.is_finished():
        engine.step()
    moved = connector == "NixlConnector"
    assert request.num_output_tokens == (1 if moved else 60)
    assert bool(engine.scheduler.eviction_counters.evictions) != moved
    assert (request.request_id in engine.scheduler.requests) == moved, "held until it is read"


def free_blocks(engine: Engine) -> int:
    free: int = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPushConnector"])
def test_what_an_aborted_load_holds_comes_back(connector, asynchronous):
    """The other server stands still while a client leaves (vllm#46283).

    It may still write to the blocks, which vLLM therefore keeps until it hears of the transfer,
    with eviction and without. Other requests go on with what is left.
    """
    engine = Engine(replace(NIXL, connector=connector, asynchronous=asynchronous), lambda *_: 5)
    remote, before = engine.worker.remote, free_blocks(engine)
    assert remote is not None
    remote.stopped = True
    loading = engine.add(PROMPT, 9)
    engine.step()
    assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.abort(loading)
    others = [engine.add([number + 2, *PROMPT], 30, prefilled=False) for number in range(3)]
    while not all(one.is_finished() for one in others):
        engine.step()
    engine.settle()
    assert before - free_blocks(engine) == -(-len(PROMPT) // NIXL.block_size)
    remote.stopped = False
    engine.finish()
    assert free_blocks(engine) == before
    assert all(one.num_output_tokens == 30 for one in others)
    assert engine.scheduler.eviction_counters.evictions_prefill == 3


@pytest.mark.parametrize("offload", [0, 600])
@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize("blocks", [76, 77, 80])
def test_loads_that_hold_all_blocks_go_on(blocks, priority, offload):
    """The head of the queue finds no room, and only those behind it can make some (vllm#45388,
    #27074). The three loads have 25 blocks each, and no other block is free with 76."""
    setup = replace(NIXL, blocks=blocks, priority=priority, offload=offload)
    engine = Engine(setup, lambda *_: 5)
    remote = engine.worker.remote
    assert remote is not None
    remote.stopped = True
    loads = [engine.add([number + 2, *PROMPT[1:]], 60, priority=5) for number in range(3)]
    engine.step()
    assert {one.status for one in loads} == {RequestStatus.WAITING_FOR_REMOTE_KVS}
    head = engine.add(PROMPT[::-1], 60, priority=0, prefilled=False)
    for _ in range(4):
        engine.step()
    assert not head.num_computed_tokens
    remote.stopped = False
    engine.finish(patience=100)
    assert [one.num_output_tokens for one in (*loads, head)] == [60] * 4
    assert engine.scheduler.eviction_counters.evictions_prefill >= 4


def test_a_failed_load_lets_loaded_requests_pass():
    """A request whose load failed holds no blocks, and finds no room: those that hold all others
    are behind it in vLLM's queue, and would never run. A random day found it."""
    setup = Setup(
        budget=96, window=16, interval=64, pyramid=2, beta=2.0, blocks=37, max_num_seqs=8,
        max_batched=8, long_prefill=5, asynchronous=True, priority=True, rings=1,
        reserve_full=False, shared="evict", memory=10**9, offload=60, sliding_window=16,
    )  # fmt: skip
    wish = Wish("none", 105, 0, 0, 0.7451943833302148, True, "pressure", 100)
    events = [
        ("steps", 59), ("burst", 34, 6, 3, 10), ("add", 181, 4, 55, 0, None),
        ("repeat", 14, 189, None), ("many", 33, 2, 104, None), ("abort", 0, False),
        ("ask", 0, 4, 45, 8), ("ask", 3, 1, 8, 23), ("ask", 0, 4, 45, 8), ("squeeze", 48, 3),
        ("follow", 6, 51, 4), ("ask", 2, 1, 58, 36), ("add", 208, 4, 195, 2, None),
        ("abort", 7, True), ("add", 38, 0, 48, 2, None), ("burst", 191, 6, 4, 59),
        ("repeat", 10, 57, wish), ("abort", 7, True), ("add", 31, 0, 49, 2, None),
        ("lose", 16, 37), ("burst", 191, 6, 4, 59), ("steps", 1),
    ]  # fmt: skip
    totals: Counter[str] = Counter()
    play(Scenario(setup, 63422, events), totals)
    assert totals["remote_failures"] and totals["evictions"]


def test_a_window_is_not_recorded_for_an_eviction_that_gives_nothing_back():
    """A chunk begins the window of a prompt whose blocks others hold, and the next chunk ends it
    when they have let go: the eviction waits for another window. A random day found it."""
    setup = Setup(
        budget="10%", window=16, interval=4, blocks=38, max_num_seqs=4, max_batched=8,
        asynchronous=True, connector="ExampleConnector", load_failure="fail",
    )  # fmt: skip
    engine = run(Scenario(setup, 4322, [("burst", 203, 3, 4, 8), ("burst", 224, 3, 4, 8)]))
    counters = engine.scheduler.eviction_counters
    assert counters.skipped_shared and counters.postponed_ring and counters.evictions_prefill


@pytest.mark.parametrize("priority", [False, True])
def test_loads_from_host_memory_that_hold_all_blocks_go_on(priority):
    """The same for vLLM's offload (vllm#45388)."""
    engine = Engine(replace(NIXL, connector="", offload=600, blocks=76, priority=priority))
    engine.worker.sample = lambda *_: 5
    offload = engine.worker.offload
    assert offload is not None
    prompts = [[number + 2, *PROMPT[1:]] for number in range(3)]
    for prompt in prompts:
        engine.add(prompt, 1)
        engine.finish()
    lose(engine)
    offload._rng.randrange = lambda *_: 6
    loads = [engine.add(prompt, 60, priority=5) for prompt in prompts]
    engine.step()
    assert RequestStatus.WAITING_FOR_REMOTE_KVS in {one.status for one in loads}
    head = engine.add(PROMPT[::-1], 60, priority=0)
    engine.finish(patience=100)
    assert [one.num_output_tokens for one in (*loads, head)] == [60] * 4
    assert offload.loads >= 3 and engine.scheduler.eviction_counters.evictions_prefill >= 4


@pytest.mark.parametrize(
    "connector", ["NixlConnector", "NixlPushConnector", "DecodeBenchConnector"]
)
def test_a_request_for_logprobs_of_its_prompt_loads_nothing(connector):
    """A load brings no logits (vllm#50792): the prompt is computed, and the other server told."""
    engine = Engine(replace(NIXL, connector=connector), lambda *_: 5)
    remote = engine.worker.remote
    assert remote is not None
    request = engine.add(PROMPT, 9)
    # As vLLM sets it for ``prompt_logprobs``.
    request.skip_reading_prefix_cache = True
    computed = 0
    while not request.num_output_tokens:
        computed += engine.step().total_num_scheduled_tokens
        engine.settle()
    engine.finish()
    assert computed == len(PROMPT) and not remote.loads and not remote.filled
    assert engine.scheduler.eviction_counters.evictions_prefill == 1

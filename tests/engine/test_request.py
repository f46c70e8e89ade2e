"""The record of a request: progress, ring slots, and what may be published or reused."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.requests import RequestOptions
from vllm_kvevict.engine.blocks import EvictionCore
from vllm_kvevict.engine.request import Phase, RequestState
from vllm_kvevict.engine.ring_queue import RingQueue
from vllm_kvevict.engine.table import RequestTable
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.policies.base import Requirements
from vllm_kvevict.rules.ring_slots import RingSlots
from vllm_kvevict.rules.rule import EvictionRule

DEFAULTS = RequestOptions("snapkv")


@dataclass
class Stub:
    """What the record reads of vLLM's Request."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    max_tokens: int = 50
    resumable: bool = False
    pooling_params: object = None
    options: RequestOptions = DEFAULTS
    num_computed_tokens: int = 0
    all_token_ids: list[int] = field(default_factory=list)


class Book:
    """A table with its turns."""

    def __init__(self, *requests: Stub, rings: int | None = 1, budgets: Any = (40,), interval=16):
        rules = {g: EvictionRule(8, 8, interval, budget_tokens=b) for g, b in enumerate(budgets)}
        window: Any = "required" if rings is not None else "none"
        needs = {
            "snapkv": Requirements(window),
            "h2o": Requirements(
                "none", every_query=True, floats_per_token=1, attention="any:Class"
            ),
            "probe": Requirements("optional"),
        }
        config = EvictionConfig(policy="snapkv", budget=64, window=8)
        self.table = RequestTable(rules, needs, config, max_model_len=200)
        slots = RingSlots(rings) if rings is not None else None
        self.turns = RingQueue(self.table, slots, tokens_a_step=1)
        scheduler: Any = None
        self.core = EvictionCore(scheduler, self.table, self.turns, {}, Counters())
        for request in requests:
            self.table.add(request, request.options)

    def waiting(self, name: str) -> RequestState:
        return self.table.states[name]

    def admit(self, name: str) -> RequestState:
        state = self.table.states[name]
        state.begin()
        self.core.begin(state)
        return state

    def release(self, name: str) -> None:
        self.core.return_to_waiting(self.table.states[name])


def decoding(book: Book, name: str) -> RequestState:
    """A request whose prefill is over and whose coming step observes."""
    state = book.admit(name)
    state.progress[0].next_eviction = 116
    state.refresh()
    state.request.num_computed_tokens = 110
    book.turns.finish_step(state, 110)
    return state


def test_a_state_lives_until_it_is_removed_and_begins_anew_when_released():
    book = Book(Stub("a", 100, 100))
    state = book.waiting("a")
    assert state.phase is Phase.WAITING and not state.holds_blocks
    assert book.admit("a") is state and state.phase is Phase.PREFILL
    assert book.table.prefilling == {"a": state}
    book.release("a")
    book.release("a")
    assert state.phase is Phase.WAITING and not book.table.prefilling
    book.table.remove("a")
    assert not book.table.states


def test_drafts_reach_up_to_where_queries_are_needed_and_never_into_an_eviction():
    state = Book(Stub("a", 100, 100)).admit("a")
    state.evict(0, 100)
    assert (state.progress[0].next_eviction, state.quiet_until) == (116, 108)
    assert [state.max_drafts(n) for n in (101, 107, 108)] == [7, 1, 0]
    # The step that evicts ends at 116; later ones come where an eviction is put off.
    assert [state.max_drafts(n) for n in (109, 114, 115, 116, 120)] == [6, 1, 0, 0, 0]


def test_no_draft_where_attention_is_added_up_and_any_where_nothing_is_due():
    options = RequestOptions("h2o")
    state = Book(Stub("a", 100, 100, options=options)).admit("a")
    state.evict(0, 100)
    assert state.max_drafts(101) == 0
    never = Book(Stub("a", 20, 20, max_tokens=5)).admit("a")
    assert never.max_drafts(21) > 1000


def test_a_preempted_request_starts_anew_at_all_its_tokens():
    request = Stub("a", 100, 100)
    book = Book(request)
    book.admit("a").progress[0].evict(100)
    book.release("a")
    request.num_tokens = 130
    again = book.admit("a").progress[0]
    assert (again.prefill_end, again.prompt_len, again.evicted) == (130, 100, False)


@pytest.mark.parametrize("never", [dict(resumable=True), dict(pooling_params=object())])
def test_requests_without_a_foreseeable_end_of_prefill_never_evict(never):
    state = Book(Stub("a", 100, 100, **never)).admit("a")
    assert not state.evicts and state.hit_cap == 100 and state.next_chunk_end(0) is None


def test_last_step_is_the_one_that_samples_the_last_token():
    book = Book(Stub("a", 100, 100, max_tokens=1), Stub("b", 100, 100, max_tokens=2))
    assert book.waiting("a").last_step(100)
    assert not book.waiting("b").last_step(100) and book.waiting("b").last_step(101)


def test_last_step_knows_the_longest_sequence():
    state = Book(Stub("a", 100, 100, max_tokens=1000)).waiting("a")
    assert not state.last_step(198) and state.last_step(199)


def test_a_window_is_ready_when_recorded_from_its_first_query():
    book = Book(Stub("a", 100, 100))
    state = book.admit("a")
    assert book.turns.window_ready(state, 92, 100)
    assert not book.turns.window_ready(state, 93, 100)
    assert not state.observes(92) and state.observes(93), "the window starts at 92"
    book.turns.record_prefill(state, 90, 95)
    assert (state.ring, state.recorded_from) == (0, 90)
    assert book.turns.window_ready(state, 95, 100)
    book.turns.finish_step(state, 95)
    assert state.ring == 0


def test_a_slot_is_given_back_when_no_query_is_needed_next():
    book = Book(Stub("a", 100, 100, max_tokens=100), interval=64)
    state = book.admit("a")
    book.turns.record_prefill(state, 0, 100)
    state.evict(0, 100)
    book.turns.finish_step(state, 100)
    assert state.ring is None and book.turns.slots.num_free == 1
    assert state.phase is Phase.QUIET
    assert not state.observes(156) and state.observes(157), "164 needs queries 156 to 163"
    for _ in range(56):
        book.turns.wake_due()
        assert not book.turns.near
    state.request.num_computed_tokens = 156
    book.turns.wake_due()
    book.turns.share_out(lambda state: True)
    assert (state.ring, state.recorded_from, state.phase) == (0, 156, Phase.NEAR)


def test_without_a_free_slot_the_window_is_not_ready():
    book = Book(Stub("a", 100, 100), Stub("b", 100, 100))
    a, b = book.admit("a"), book.admit("b")
    book.turns.record_prefill(a, 0, 100)
    book.turns.record_prefill(b, 0, 100)
    assert b.ring is None and not book.turns.window_ready(b, 0, 100)
    book.release("a")
    assert book.turns.window_ready(b, 0, 100)


def test_a_prompt_takes_the_slot_of_the_request_that_began_last():
    book = Book(*(Stub(name, 100, 100, 90) for name in "abcpq"), rings=2, interval=64)
    states = {name: decoding(book, name) for name in "abc"}
    book.turns.wake_due()
    book.turns.share_out(lambda state: True)
    assert [states[name].ring for name in "abc"] == [0, 1, None]
    assert "c" in book.turns.waiting
    p, q = book.admit("p"), book.admit("q")
    book.turns.record_prefill(p, 0, 100)
    assert (p.ring, states["b"].ring) == (1, None)
    book.turns.record_prefill(q, 0, 100)
    assert (q.ring, states["a"].ring) == (0, None)
    book.release("p")
    book.turns.share_out(lambda state: True)
    assert [states[name].ring for name in "abc"] == [1, None, None], "first in the queue again"


def test_windows_that_follow_one_another_give_the_slot_to_the_queue():
    """One request would hold it to its end, and the others would never evict."""
    book = Book(*(Stub(name, 100, 100, 90) for name in "ab"), rings=1, interval=8)
    a, b = decoding(book, "a"), decoding(book, "b")
    book.turns.wake_due()
    book.turns.share_out(lambda state: True)
    assert (a.ring, b.ring) == (0, None)
    a.request.num_computed_tokens = 116
    a.evict(0, 116)
    assert a.observes(117), "the next window begins at once"
    book.turns.finish_step(a, 116)
    book.turns.share_out(lambda state: True)
    assert (a.ring, b.ring) == (None, 0) and a.request_id in book.turns.waiting


def test_a_policy_that_can_do_without_a_window_takes_what_is_left_over():
    options = RequestOptions("probe")
    book = Book(Stub("a", 100, 100, options=options), Stub("b", 100, 100))
    a, b = book.admit("a"), book.admit("b")
    assert book.turns.window_ready(a, 99, 100) and not book.turns.recorded(a, 100)
    book.turns.record_prefill(a, 95, 100)
    assert a.ring is None, "the window is not computed as a whole"
    book.turns.record_prefill(a, 0, 100)
    assert a.ring == 0 and book.turns.recorded(a, 100)
    book.release("a")
    book.turns.record_prefill(b, 0, 100)
    again = book.admit("a")
    book.turns.record_prefill(again, 0, 100)
    assert again.ring is None and b.ring == 0 and book.turns.window_ready(again, 0, 100)
    assert again.hit_cap == b.hit_cap == 88, "a hit leaves the window to be computed"


def test_only_tokens_from_before_the_first_eviction_are_published():
    state = Book(Stub("a", 100, 100), budgets=(40, 72)).admit("a")
    assert state.cacheable(120) == 120
    state.evict(1, 100)
    assert state.cacheable(120) == 100 and state.cacheable(60) == 60
    state.evict(0, 104)
    assert state.cacheable(120) == 100


def test_a_hit_stops_at_the_tail_start():
    short, long = Stub("s", 47, 47), Stub("l", 100, 100)
    book = Book(short, long)
    assert book.waiting("s").hit_cap == 47
    assert book.waiting("l").hit_cap == (100 - 8) // 8 * 8
    assert Book(long, rings=None).waiting("l").hit_cap == 100


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("required", [True, True, True]),
        ("optional", [False, False, True]),
        ("none", [False, False, False]),
    ],
)
def test_a_named_context_is_scored_without_an_optional_window(window, expected):
    state = Book(Stub("a", 100, 100, options=replace(DEFAULTS, at=60))).admit("a")
    state.needs = replace(state.needs, window=window)
    assert [state.reads_window(end) for end in (30, 60, 61)] == expected


@pytest.mark.parametrize("at", [None, 99, 100])
def test_the_end_of_a_prompt_is_no_context(at):
    """The answer follows, and the window contains the question."""
    state = Book(Stub("a", 100, 100, options=replace(DEFAULTS, at=at))).admit("a")
    state.needs = replace(state.needs, window="optional")
    assert state.reads_window(100)

"""The ledger: entries, ring slots, and what may be published or reused."""

from dataclasses import dataclass

import pytest

from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.rings import RingSlots
from vllm_kvevict.schedule.timeline import Timeline
from vllm_kvevict.settings.requests import RequestOptions

DEFAULTS = RequestOptions("snapkv")


@dataclass
class Stub:
    """What the ledger reads of vLLM's Request."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    max_tokens: int = 50
    resumable: bool = False
    pooling_params: object = None
    options: RequestOptions = DEFAULTS
    num_computed_tokens: int = 0


def ledger(*requests: Stub, rings: int | None = 1, budgets=(40,)):
    return EvictionLedger(
        {request.request_id: request for request in requests},
        {group: Timeline(8, 8, 16, budget_tokens=b) for group, b in enumerate(budgets)},
        RingSlots(rings) if rings is not None else None,
        max_model_len=200,
        options=lambda request: request.options,
        windowless=frozenset({"streaming-llm"}),
    )


def test_an_entry_lives_from_admission_to_drop():
    book = ledger(Stub("a", 100, 100))
    assert book.entry("a") is not book.entry("a"), "a waiting request leaves nothing behind"
    entry = book.admit("a")
    assert book.entry("a") is entry is book.admit("a")
    book.drop("a")
    book.drop("a")
    assert not book.entries


def test_drafts_reach_up_to_where_queries_are_needed_and_never_into_an_eviction():
    entry = ledger(Stub("a", 100, 100)).admit("a")
    entry.evict(0, 100)
    assert (entry.timelines[0].due, entry.quiet_until) == (116, 108)
    assert [entry.most_drafts(n) for n in (101, 107, 108)] == [7, 1, 0]
    # The step that evicts ends at 116; later ones come where an eviction is put off.
    assert [entry.most_drafts(n) for n in (109, 114, 115, 116, 120)] == [6, 1, 0, 0, 0]
    entry.counts_attention = True
    assert entry.most_drafts(101) == 0
    entry.timelines[0].due = None
    assert entry.most_drafts(101) > 1000


def test_a_preempted_request_starts_anew_at_all_its_tokens():
    request = Stub("a", 100, 100)
    book = ledger(request)
    first = book.admit("a").timelines[0]
    first.evict(100)
    book.drop("a")
    request.num_tokens = 130
    again = book.admit("a").timelines[0]
    assert (again.prefill_end, again.prompt_len, again.evicted) == (130, 100, False)


@pytest.mark.parametrize("never", [dict(resumable=True), dict(pooling_params=object())])
def test_requests_without_a_foreseeable_end_of_prefill_never_evict(never):
    request = Stub("a", 100, 100, **never)
    book = ledger(request)
    assert book.entry("a") is None and book.admit("a") is None
    assert book.hit_cap(request) == 100 and not book.entries


def test_last_step_is_the_one_that_samples_the_last_token():
    book = ledger(Stub("a", 100, 100, max_tokens=1), Stub("b", 100, 100, max_tokens=2))
    assert book.last_step("a", 100)
    assert not book.last_step("b", 100) and book.last_step("b", 101)


def test_last_step_knows_the_longest_sequence():
    book = ledger(Stub("a", 100, 100, max_tokens=1000))
    assert not book.last_step("a", 198) and book.last_step("a", 199)


def test_a_window_is_ready_when_recorded_from_its_first_query():
    book = ledger(Stub("a", 100, 100))
    entry = book.admit("a")
    assert book.window_ready(entry, 92, 100)
    assert not book.window_ready(entry, 93, 100)
    book.observe(entry, 60, 92)
    assert entry.ring is None, "the window starts at 92"
    book.observe(entry, 90, 95)
    assert (entry.ring, entry.recorded_from) == (0, 90)
    assert book.window_ready(entry, 95, 100)
    book.settle("a", entry, 95)
    assert entry.ring == 0


def test_a_slot_is_given_back_when_no_query_is_needed_next():
    book = ledger(Stub("a", 100, 100, max_tokens=100))
    book.rules[0] = Timeline(8, 8, 64, budget_tokens=40)
    entry = book.admit("a")
    book.observe(entry, 0, 100)
    entry.evict(0, 100)
    book.settle("a", entry, 100)
    assert entry.ring is None and book.rings.num_free == 1
    assert not entry.observes(156) and entry.observes(157), "164 needs queries 156 to 163"
    book.requests["a"].num_computed_tokens = 156
    book.turns.wait("a")
    book.take_turns()
    assert (entry.ring, entry.recorded_from) == (0, 156)


def test_without_a_free_slot_the_window_is_not_ready():
    book = ledger(Stub("a", 100, 100), Stub("b", 100, 100))
    a, b = book.admit("a"), book.admit("b")
    book.observe(a, 0, 100)
    book.observe(b, 0, 100)
    assert b.ring is None and not book.window_ready(b, 0, 100)
    book.drop("a")
    assert book.window_ready(b, 0, 100)


def test_only_tokens_from_before_the_first_eviction_are_published():
    book = ledger(Stub("a", 100, 100), budgets=(40, 72))
    entry = book.admit("a")
    assert entry.cacheable(120) == 120
    entry.evict(1, 100)
    assert entry.cacheable(120) == 100 and entry.cacheable(60) == 60
    entry.evict(0, 104)
    assert entry.cacheable(120) == 100


def test_a_hit_stops_at_the_tail_start():
    short, long = Stub("s", 47, 47), Stub("l", 100, 100)
    book = ledger(short, long)
    assert book.hit_cap(short) == 47
    assert book.hit_cap(long) == (100 - 8) // 8 * 8
    assert ledger(long, rings=None).hit_cap(long) == 100

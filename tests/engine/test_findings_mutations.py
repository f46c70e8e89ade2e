"""The tests of findings fail when a finding is put back. Each test puts back one."""

from typing import Any

import pytest

from tests.engine import test_findings_blocks as blocks
from tests.engine import test_findings_turns as turns
from tests.engine import test_findings_work as work
from tests.engine.cases import SYNC
from vllm_kvevict.engine.blocks import EvictableAttentionManager, EvictionCore
from vllm_kvevict.engine.memory_pressure import Forecast
from vllm_kvevict.engine.planner import StepPlanner
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.ring_queue import RingQueue
from vllm_kvevict.engine.stores import PublishedStores

pytestmark = pytest.mark.nightly


def test_one_group_takes_what_is_free(monkeypatch):
    def evict(self: Any, state: Any, quote: Any, end: int) -> list[Any]:
        evictions = []
        for part in quote.parts:
            whole = part.store - part.reserved
            fresh = whole if whole <= self.free_after_step else part.fresh
            evictions.append(self.managers[part.group_id].evict(state, end, fresh))
        return evictions

    monkeypatch.setattr(EvictionCore, "evict", evict)
    with pytest.raises(ValueError, match="Cannot get 8 free blocks"):
        blocks.test_two_groups_share_what_is_free(SYNC, {})


def test_a_store_is_counted_twice(monkeypatch):
    reservation = EvictableAttentionManager._reservation

    def twice(self: Any, state: Any, end: int, computed: Any = None) -> int:
        with monkeypatch.context() as patched:
            patched.setattr(EvictableAttentionManager, "_reused", lambda *_: ())
            return reservation(self, state, end, computed)

    monkeypatch.setattr(EvictableAttentionManager, "_reservation", twice)
    with pytest.raises(AssertionError, match="r1"):
        blocks.test_an_admission_counts_the_store_that_it_reuses_once(SYNC)
    with pytest.raises(AssertionError, match="livelock"):
        blocks.test_a_request_that_needs_less_than_the_pool_is_admitted(SYNC)


def test_admissions_take_what_an_eviction_lacks(monkeypatch):
    monkeypatch.setattr(StepPlanner, "short", property(lambda _: 0, lambda *_: None), raising=False)
    with pytest.raises(AssertionError, match="r1"):
        blocks.test_an_eviction_that_lacks_blocks_gets_them_before_new_requests(SYNC)


def test_a_slot_is_held_to_the_end(monkeypatch):
    finish = RingQueue.finish_step

    def held(self: Any, state: Any, end: int) -> None:
        state.evicted_at = None
        finish(self, state, end)

    monkeypatch.setattr(RingQueue, "finish_step", held)
    with pytest.raises(AssertionError, match="Counter"):
        turns.test_a_request_whose_windows_follow_one_another_lets_others_record(SYNC, 1)


def test_padded_drafts_are_not_counted(monkeypatch):
    monkeypatch.setattr(RequestState, "max_drafts", lambda *_: 100)
    with pytest.raises(AssertionError, match=r"\(112, 119\)"):
        turns.test_padded_drafts_do_not_reach_across_the_next_eviction("snapkv", 113, monkeypatch)


def test_every_store_is_counted_at_every_report(monkeypatch):
    sweep = PublishedStores.sweep

    def all_of_them(self: Any) -> None:
        for _ in range(1 + len(self._to_sweep) // 8):
            sweep(self)

    monkeypatch.setattr(PublishedStores, "sweep", all_of_them)
    with pytest.raises(AssertionError, match="a line for each store"):
        work.test_reports_do_not_count_every_store_again(lost=False)


def test_a_forecast_is_computed_anew_for_every_request(monkeypatch):
    contribution = Forecast._contribution

    def anew(self: Any, state: Any, length: int) -> Any:
        state.forecast = None
        return contribution(self, state, length)

    monkeypatch.setattr(Forecast, "_contribution", anew)
    with pytest.raises(AssertionError, match="lines a running request"):
        work.test_arrivals_do_not_forecast_every_request_again()

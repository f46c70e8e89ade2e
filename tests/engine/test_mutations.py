"""The accounting tests fail when a rule is broken. Each test breaks one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from tests.engine.scenarios import SCENARIOS, Scenario, run
from tests.engine.test_accounting import PROFILE
from vllm_kvevict.engine import sharing
from vllm_kvevict.engine.entry import Entry
from vllm_kvevict.engine.ledger import EvictionLedger
from vllm_kvevict.engine.manager import EvictableAttentionManager
from vllm_kvevict.engine.planner import StepPlanner
from vllm_kvevict.engine.points import EvictionPoints
from vllm_kvevict.engine.scheduler import EvictionMixin
from vllm_kvevict.engine.shared_store import SharedStore
from vllm_kvevict.engine.stores import Stores
from vllm_kvevict.schedule.step_plan import PLAN
from vllm_kvevict.settings.requests import RequestOptions


def hunt() -> None:
    @settings(PROFILE, max_examples=300, phases=[Phase.generate])
    @given(SCENARIOS)
    def accounting(scenario: Scenario) -> None:
        run(scenario)

    accounting()


def wrap(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: Callable) -> None:
    """Call ``after(self, *args)`` behind every call of a method."""
    original = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        after(self, *args)
        return result

    monkeypatch.setattr(owner, name, wrapped)


def test_accounting_catches_a_hit_that_covers_the_window(monkeypatch):
    monkeypatch.setattr(EvictionLedger, "hit_cap", lambda self, request: request.num_tokens)
    with pytest.raises(AssertionError, match="a hit covers the window"):
        hunt()


def test_accounting_catches_blocks_freed_before_the_step_was_processed(monkeypatch):
    def retire(self: Any, output: Any) -> None:
        plan = getattr(output, PLAN, None)
        for eviction in plan.evictions if plan else ():
            for group in eviction.groups:
                self._evicting[group.group_id].retire(eviction.request_id, group)

    wrap(monkeypatch, EvictionMixin, "_update_after_schedule", retire)
    with pytest.raises(AssertionError, match="freed before"):
        hunt()


def test_accounting_catches_publishing_after_an_eviction(monkeypatch):
    monkeypatch.setattr(Entry, "cacheable", lambda self, n: n)
    with pytest.raises(AssertionError, match="is published and holds something else"):
        hunt()


def test_accounting_catches_a_ring_slot_with_two_writers(monkeypatch):
    def settle(self: Any, plan: Any, request_id: str, entry: Any, start: int, end: int) -> None:
        self._ledger.settle(request_id, entry, end)

    wrap(monkeypatch, StepPlanner, "_plan_eviction", settle)
    with pytest.raises(AssertionError, match=r"ring slot used twice|is not in the ring"):
        hunt()


def test_accounting_catches_an_overwritten_block_that_is_still_published(monkeypatch):
    def take_own(self: Any, blocks: list[Any], most: int) -> list[Any]:
        return [block for block in blocks if block.ref_cnt == 1][:most]

    monkeypatch.setattr(EvictableAttentionManager, "_take_own", take_own)
    with pytest.raises(AssertionError, match="is published"):
        hunt()


def test_accounting_catches_survivors_in_blocks_of_others(monkeypatch):
    def take_own(self: Any, blocks: list[Any], most: int) -> list[Any]:
        taken = blocks[::-1][:most]
        self.block_pool.evict_blocks({block.block_id for block in taken})
        return taken

    monkeypatch.setattr(EvictableAttentionManager, "_take_own", take_own)
    with pytest.raises(AssertionError, match=r"has another owner|at a loss"):
        hunt()


def test_accounting_catches_an_eviction_at_a_loss(monkeypatch):
    monkeypatch.setattr(Stores, "worthwhile", lambda self, request_id, entry, groups, end: groups)
    with pytest.raises((AssertionError, ValueError), match=r"at a loss|free blocks from the pool"):
        hunt()


def test_accounting_catches_a_chunk_that_runs_across_an_eviction_point(monkeypatch):
    monkeypatch.setattr(EvictionPoints, "clip", lambda self, request_id, start, end: end)
    with pytest.raises(AssertionError, match="crosses"):
        hunt()


def test_accounting_catches_a_hit_across_an_eviction_point(monkeypatch):
    # What the cap was before there were eviction points.
    def hit_cap(self: Any, request: Any) -> int:
        entry = self.entry(request.request_id)
        ends = [t.prefill_end - t.timeline.window for t in entry.timelines.values()]
        return max(0, min(ends, default=request.num_tokens))

    monkeypatch.setattr(EvictionLedger, "hit_cap", hit_cap)
    with pytest.raises(AssertionError, match="a hit covers the window"):
        hunt()


def test_accounting_catches_a_ring_for_a_policy_without_a_window(monkeypatch):
    wrap(monkeypatch, Entry, "__post_init__", lambda self: setattr(self, "needs_window", True))
    with pytest.raises(AssertionError, match="a ring for a policy without a window"):
        hunt()


def test_accounting_catches_another_requests_budget(monkeypatch):
    monkeypatch.setattr(RequestOptions, "timeline", lambda self, rule: rule)
    with pytest.raises(AssertionError):
        hunt()


def test_accounting_catches_an_incomplete_window(monkeypatch):
    monkeypatch.setattr(EvictionLedger, "window_ready", lambda self, entry, start, end: True)
    with pytest.raises(AssertionError):
        hunt()


def test_accounting_catches_a_store_taken_that_has_lost_a_block(monkeypatch):
    monkeypatch.setattr(SharedStore, "intact", True)
    with pytest.raises((AssertionError, AttributeError)):
        hunt()


def test_accounting_catches_stores_shared_by_tenants(monkeypatch):
    share_key = sharing.share_key

    def unsalted(request: Any, entry: Any, size: int, prepare: Any) -> Any:
        key = share_key(request, entry, size, prepare)
        return key and replace(key, prefix=b"", rest=tuple(request.all_token_ids[: key.point]))

    monkeypatch.setattr(sharing, "share_key", unsalted)
    with pytest.raises(AssertionError):
        hunt()


def test_accounting_catches_a_store_that_is_not_held(monkeypatch):
    monkeypatch.setattr(EvictableAttentionManager, "_taking", lambda self, request_id: ())
    with pytest.raises((AssertionError, KeyError)):
        hunt()

"""The accounting tests fail when a rule is broken. Each test breaks one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.engine import days
from tests.engine.cases import SYNC, counters, engine, tokens
from tests.engine.scenarios import Scenario, run
from tests.engine.shadow import ShadowWorker
from vllm_kvevict.config.requests import RequestOptions
from vllm_kvevict.engine import stores
from vllm_kvevict.engine.blocks import EvictableAttentionManager
from vllm_kvevict.engine.planner import StepPlanner
from vllm_kvevict.engine.published import PublishedGroup, PublishedStore
from vllm_kvevict.engine.replayed import Replayed
from vllm_kvevict.engine.request import RequestState
from vllm_kvevict.engine.ring_queue import RingQueue
from vllm_kvevict.engine.scheduler import EvictingScheduler
from vllm_kvevict.engine.tiered_stores import TieredStores
from vllm_kvevict.policies.base import Requirements
from vllm_kvevict.rules.quote import Quote
from vllm_kvevict.rules.step_plan import PLAN

pytestmark = pytest.mark.nightly


def caught(message: str) -> bool:
    """Whether random days end with this message, of the harness, the engine or vLLM's pool.

    Days on which another rule complains first are not enough.
    """

    def day(scenario: Scenario) -> None:
        run(scenario)

    return days.hunt(day, message)


def wrap(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: Callable) -> None:
    """Call ``after(self, *args)`` behind every call of a method."""
    original = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        after(self, *args)
        return result

    monkeypatch.setattr(owner, name, wrapped)


def test_accounting_catches_a_hit_that_covers_the_window(monkeypatch):
    monkeypatch.setattr(RequestState, "hit_cap", property(lambda self: self.request.num_tokens))
    assert caught("a hit covers the window")


def test_accounting_catches_blocks_freed_before_the_step_was_processed(monkeypatch):
    def retire(self: Any, output: Any) -> None:
        plan = getattr(output, PLAN, None)
        for eviction in plan.evictions if plan else ():
            for group in eviction.groups:
                state = self._table.states[eviction.request_id]
                self._evicting[group.group_id].free_replaced(state, group)

    wrap(monkeypatch, EvictingScheduler, "_update_after_schedule", retire)
    assert caught("freed before")


def test_accounting_catches_publishing_after_an_eviction(monkeypatch):
    monkeypatch.setattr(RequestState, "cacheable", lambda self, n: n)
    assert caught("is published and holds something else")


def test_accounting_catches_a_ring_slot_with_two_writers(monkeypatch):
    def give_back(self: Any, plan: Any, state: Any, start: int, end: int) -> None:
        self._turns._give_back(state)

    wrap(monkeypatch, StepPlanner, "_plan_observed", give_back)
    assert caught(r"ring slot used twice|is not in the ring")


def test_accounting_catches_an_overwritten_block_that_is_still_published(monkeypatch):
    def reuse(self: Any, blocks: list[Any], count: int) -> list[Any]:
        return [block for block in blocks if block.ref_cnt == 1][:count]

    monkeypatch.setattr(EvictableAttentionManager, "_reuse", reuse)
    assert caught("is published")


def test_accounting_catches_survivors_in_blocks_of_others(monkeypatch):
    def reuse(self: Any, blocks: list[Any], count: int) -> list[Any]:
        reused = blocks[::-1][:count]
        self.block_pool.evict_blocks({block.block_id for block in reused})
        return reused

    monkeypatch.setattr(EvictableAttentionManager, "_reuse", reuse)
    assert caught(r"has another owner|at a loss")


def test_accounting_catches_an_eviction_at_a_loss(monkeypatch):
    monkeypatch.setattr(Quote, "profitable", property(lambda self: self))
    monkeypatch.setattr(Quote, "unprofitable", [])
    assert caught(r"at a loss|free blocks from the pool")


def test_accounting_catches_a_chunk_that_runs_across_an_eviction_point(monkeypatch):
    monkeypatch.setattr(RequestState, "clip_chunk", lambda self, start, end: end)
    assert caught("crosses")


def test_accounting_catches_a_hit_across_an_eviction_point(monkeypatch):
    # What the cap was before there were eviction points.
    def hit_cap(self: Any) -> int:
        ends = [t.prefill_end - t.rule.window for t in self.progress.values()]
        return max(0, min(ends, default=self.request.num_tokens))

    monkeypatch.setattr(RequestState, "hit_cap", property(hit_cap))
    assert caught("a hit covers the window")


def test_accounting_catches_a_ring_for_a_policy_without_a_window(monkeypatch):
    records = Requirements("required")
    wrap(monkeypatch, RequestState, "begin", lambda self, *args: setattr(self, "needs", records))
    assert caught("a ring for a policy without a window")


def test_accounting_catches_another_requests_budget(monkeypatch):
    monkeypatch.setattr(RequestOptions, "own_rule", lambda self, rule: rule)
    assert caught("a store of another budget")


def test_accounting_catches_an_incomplete_window(monkeypatch):
    monkeypatch.setattr(RingQueue, "window_ready", lambda self, state, start, end: True)
    assert caught("evicts without its window")


def test_accounting_catches_a_store_taken_that_has_lost_a_block(monkeypatch):
    """Between two steps such a store is dropped, so the block is lost in the step that takes it."""

    def taken() -> int:
        core = engine(replace(SYNC, max_batched=512))
        core.add(tokens(130), 4, asked={"kv_eviction_at": 100})
        core.finish()
        core.add(tokens(80, 2), 4, asked={"kv_eviction": "none"})
        core.finish()
        # The pool hands out the blocks of the store next, and then those of the second prompt.
        (store,) = core.scheduler._stores._published.values()
        own = {block.block_id for block, _ in store.hashes}
        pool = core.scheduler.kv_cache_manager.block_pool
        queued = [block.block_id in own for block in pool.free_block_queue.get_all_free_blocks()]
        core.hold(len(queued) - queued.index(True))
        core.add(tokens(8, 1), 40, asked={"kv_eviction": "none"})
        core.add(tokens(130), 4, asked={"kv_eviction_at": 100})
        core.step()
        return counters(core).stores_reused

    assert taken() == 0
    monkeypatch.setattr(PublishedStore, "intact", True)
    with pytest.raises(AssertionError, match="has another owner"):
        taken()


def test_accounting_catches_stores_shared_by_tenants(monkeypatch):
    share_key = stores.share_key

    def unsalted(request: Any, *args: Any) -> Any:
        key = share_key(request, *args)
        return key and replace(key, prefix=b"", rest=tuple(request.all_token_ids[: key.point]))

    monkeypatch.setattr(stores, "share_key", unsalted)
    assert caught("a store of other tokens")


def test_accounting_catches_a_store_that_is_not_held(monkeypatch):
    monkeypatch.setattr(EvictableAttentionManager, "_reused", lambda self, state: ())
    assert caught("a store is not held")


def test_accounting_catches_a_store_that_does_not_come_back(monkeypatch):
    wrap(monkeypatch, TieredStores, "copy", lambda self, plan: plan.loads.clear())
    assert caught("a store of other tokens|holds something else")


def test_accounting_catches_a_store_that_is_not_saved(monkeypatch):
    wrap(monkeypatch, TieredStores, "copy", lambda self, plan: plan.saves.clear())
    assert caught("a store that nobody saved")


def test_accounting_catches_a_store_that_is_copied_late(monkeypatch):
    """Not before it is asked for: others have had its blocks."""
    copies: dict[tuple[int, str], Any] = {}
    save, load = ShadowWorker._save, ShadowWorker._load

    def saved(self: ShadowWorker, copy: Any) -> None:
        copies[id(self), copy.name] = copy
        save(self, copy)

    def loaded(self: ShadowWorker, copy: Any) -> None:
        save(self, copies[id(self), copy.name])
        load(self, copy)

    monkeypatch.setattr(ShadowWorker, "_save", saved)
    monkeypatch.setattr(ShadowWorker, "_load", loaded)
    assert caught("holds something else|overwritten or never computed")


def test_accounting_catches_blocks_that_are_taken_from_others(monkeypatch):
    def take(self: Any, shape: Any) -> Any:
        blocks = self._pool.blocks[1 : 1 + shape.blocks]
        self._pool.touch(blocks)
        store, tail = tuple(blocks[: shape.store]), tuple(blocks[shape.store :])
        return PublishedGroup(shape.tail_start, store, tail)

    monkeypatch.setattr(TieredStores, "_take", take)
    assert caught("has another owner|holds something else")


def test_accounting_catches_a_replay_that_does_not_hold_the_tail(monkeypatch):
    def stores(self: Any) -> list[Any]:
        return [block for one in self.groups.values() for block in one.store]

    monkeypatch.setattr(Replayed, "blocks", property(stores))
    assert caught("overwritten or never computed|has another owner|references")

"""Routers that replay events, by group or not, counting or not, expect what is there."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

from tests.engine import days
from tests.engine.harness import Engine, Setup
from tests.engine.scenarios import Day, Scenario
from vllm_kvevict.engine.grouped_events import GroupedEvents


class Routers:
    """A router that ignores groups, one that reads the first only, one that follows them, and one
    that counts announcements and removals.

    Args:
        scheduler: Hands out the events.

    """

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        self.pool = manager.block_pool
        self.pool.enable_kv_cache_events = True
        # The invariants of other tests read vLLM's own events here.
        self.pool.take_events = BlockPool.take_events.__get__(self.pool)
        self.groups = len(scheduler.kv_cache_config.kv_cache_groups)
        self.plain: set[Any] = set()
        self.grouped: set[tuple[Any, Any]] = set()
        self.counted: Counter[tuple[Any, Any]] = Counter()
        self.events = self.copies = 0
        self._take = manager.take_events
        manager.take_events = self._follow

    def _follow(self) -> list[Any]:
        events: list[Any] = self._take()
        for event in events:
            self.events += 1
            if isinstance(event, AllBlocksCleared):
                self.plain.clear()
                self.grouped.clear()
                self.counted.clear()
                continue
            named = {(one, event.group_idx) for one in event.block_hashes}
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                self.plain |= set(event.block_hashes)
                self.grouped |= named
                self.counted.update(named)
            else:
                assert isinstance(event, BlockRemoved)
                self.plain -= set(event.block_hashes)
                self.grouped -= named
                self.counted.subtract(named)
        return events

    def held_twice(self) -> int:
        """How many hashes several blocks have."""
        held = self.pool.cached_block_hash_to_block._cache.values()
        return sum(isinstance(blocks, dict) and len(blocks) > 1 for blocks in held)

    def check(self) -> None:
        self._follow()
        self.copies += self.held_twice()
        held: dict[Any, set[Any]] = {}
        for one in self.pool.cached_block_hash_to_block._cache:
            name = maybe_convert_block_hash(get_block_hash(one))
            held.setdefault(name, set()).add(get_group_id(one))
        there = {name for name, groups in held.items() if len(groups) == self.groups}
        first = {name for name, group in self.grouped if group == 0}
        for believed in (self.plain, first):
            assert believed <= there, "a block is announced that some group does not have"
        assert first == {name for name, _ in self.grouped} == self.plain
        assert len(self.grouped) == self.groups * len(self.plain)
        assert there == self.plain, "a block is there, and its removal was announced"
        assert self.grouped == {one for one, count in self.counted.items() if count}
        assert not self.counted or set(self.counted.values()) <= {0, 1}


def routed(engine: Engine) -> Routers:
    routers = Routers(engine.scheduler)
    engine.invariants.announced = routers  # type: ignore[assignment]
    return routers


SETUP = Setup(budget=64, window=8, interval=16, blocks=90, pyramid=3)
PROMPT = [2 + number % 700 for number in range(195)]


def run(scenario: Scenario, groups: int) -> Routers:
    setup = replace(
        scenario.setup, pyramid=groups if groups > 1 else 0, shares=(), second_budget=None,
        sliding_window=None, caching=True, offload=0,
    )  # fmt: skip
    day = Day(replace(scenario, setup=setup))
    routers = routed(day.engine)
    for event in scenario.events:
        getattr(day, event[0])(*event[1:])
    day.engine.finish()
    return routers


@pytest.mark.parametrize("groups", [1, 3])
def test_random_days(groups: int) -> None:
    seen: list[Routers] = []
    days.play(lambda scenario: seen.append(run(scenario, groups)), 15)
    assert sum(routers.events for routers in seen) > 100 * groups
    assert any(routers.copies for routers in seen), "no two blocks had one hash"


@pytest.mark.parametrize("groups", [1, 3])
def test_one_of_two_blocks_with_one_hash_leaves(groups: int) -> None:
    """Two requests compute one prompt, and others take the blocks of the first (vllm#55092)."""
    setup = replace(SETUP, pyramid=groups if groups > 1 else 0, blocks=60 * groups, interval=0)
    engine = Engine(setup, lambda *_: 5)
    routers = routed(engine)
    never = {"kv_eviction": "none"}
    engine.add(PROMPT, 1, asked=never)
    engine.finish()
    second = engine.add(PROMPT, 60, asked=never)
    # As vLLM sets it for ``prompt_logprobs``.
    second.skip_reading_prefix_cache = True
    while not second.num_output_tokens:
        engine.step()
    whole = {name for name, group in routers.grouped if group == 0}
    assert routers.copies and len(whole) == len(PROMPT) // 8
    others = [engine.add([2 + number, *PROMPT], 4) for number in range(2)]
    while not all(one.is_finished() for one in others):
        engine.step()
    assert engine.scheduler.eviction_counters.evictions_prefill == 2
    assert not routers.held_twice(), "the blocks of the first request are still there"
    assert whole <= routers.plain, "those of the second one are"
    while not second.is_finished():
        engine.step()
    engine.add(PROMPT, 1, asked=never)
    assert engine.step().total_num_scheduled_tokens == len(PROMPT) % 8, "a hit, as announced"
    engine.finish()


def test_events_of_a_prompt_name_every_group_once() -> None:
    engine = Engine(SETUP, lambda *_: 5)
    routers = routed(engine)
    engine.add(PROMPT, 1, asked={"kv_eviction": "none"})
    engine.finish()
    assert len(routers.plain) == 195 // 8 and routers.events <= 3 * 4
    engine.scheduler.reset_prefix_cache()
    routers.check()
    assert not routers.plain


def test_without_it_routers_expect_hits_that_are_not_there(monkeypatch) -> None:
    """An eviction overwrites blocks of one group."""
    monkeypatch.setattr(GroupedEvents, "translate", lambda self, events: list(events))

    def day(scenario: Scenario) -> None:
        run(scenario, 3)

    assert days.hunt(day, "some group does not have", 20)


def test_extra_keys_and_parents_stay_with_their_blocks() -> None:
    """Blocks that become complete one after the other are one event again."""

    def stored(hashes: list[bytes], parent: bytes | None, group: int) -> BlockStored:
        return BlockStored(
            block_hashes=list(hashes),
            parent_block_hash=parent,
            token_ids=[ord(one) for name in hashes for one in name.decode() * 2],
            block_size=2,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[(name.decode(),) for name in hashes],
            group_idx=group,
        )

    engine = Engine(replace(SETUP, pyramid=2), lambda *_: 5)
    events = GroupedEvents(engine.scheduler._core)
    assert events.translate([stored([b"a", b"b", b"c"], None, 0)]) == []
    told = events.translate([stored([b"a", b"b"], None, 1)])
    assert told == [stored([b"a", b"b"], None, 0), stored([b"a", b"b"], None, 1)]
    told = events.translate([stored([b"c"], b"b", 1), stored([b"x"], None, 1)])
    assert told == [stored([b"c"], b"b", 0), stored([b"c"], b"b", 1)]
    removed = BlockRemoved(block_hashes=[b"b"], medium="GPU", group_idx=1)
    told = events.translate([removed, removed])
    assert [(one.block_hashes, one.group_idx) for one in told] == [([b"b"], 0), ([b"b"], 1)]
    # Known in group 0 still: announced again as soon as group 1 has it.
    assert len(events.translate([stored([b"b"], b"a", 1)])) == 2

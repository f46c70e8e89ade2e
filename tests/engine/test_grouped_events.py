"""Routers that replay events, with and without the groups, never expect a hit that is not there."""

from dataclasses import replace
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

from tests.engine import days
from tests.engine.harness import Engine, Setup
from tests.engine.scenarios import Day, Scenario
from vllm_kvevict.engine.grouped_events import GroupedEvents


class Routers:
    """A router that ignores groups, one that reads the first only, and one that follows them.

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
        self.removed: set[Any] = set()
        self.events = 0
        self._take = manager.take_events
        manager.take_events = self._follow

    def _follow(self) -> list[Any]:
        events: list[Any] = self._take()
        for event in events:
            self.events += 1
            if isinstance(event, AllBlocksCleared):
                self.plain.clear()
                self.grouped.clear()
                continue
            named = {(one, event.group_idx) for one in event.block_hashes}
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                self.plain |= set(event.block_hashes)
                self.grouped |= named
            else:
                assert isinstance(event, BlockRemoved)
                self.plain -= set(event.block_hashes)
                self.grouped -= named
                self.removed |= set(event.block_hashes)
        return events

    def check(self) -> None:
        self._follow()
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
        assert there - self.plain <= self.removed, "a block was never announced"


def routed(engine: Engine) -> Routers:
    routers = Routers(engine.scheduler)
    engine.invariants.announced = routers  # type: ignore[assignment]
    return routers


SETUP = Setup(budget=64, window=8, interval=16, blocks=90, pyramid=3)
PROMPT = [2 + number % 700 for number in range(195)]


def run(scenario: Scenario) -> int:
    setup = replace(
        scenario.setup, pyramid=3, shares=(), second_budget=None, sliding_window=None,
        caching=True, offload=0,
    )  # fmt: skip
    day = Day(replace(scenario, setup=setup))
    routers = routed(day.engine)
    for event in scenario.events:
        getattr(day, event[0])(*event[1:])
    day.engine.finish()
    return routers.events


def test_random_days() -> None:
    seen: list[int] = []
    days.play(lambda scenario: seen.append(run(scenario)), 15)
    assert sum(seen) > 300


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
        run(scenario)

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

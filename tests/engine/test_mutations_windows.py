"""The tests of stores with windows fail when a rule is broken. Each test breaks one."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engine import days, test_windows
from tests.engine.cases import SYNC
from tests.engine.scenarios import Scenario, conversing, run
from vllm_kvevict.engine.published import PublishedStore
from vllm_kvevict.engine.suffix_cache import SuffixCache
from vllm_kvevict.engine.windows import Windows

pytestmark = pytest.mark.nightly

STALE = "overwritten or never computed"


def caught(message: str, conversations: bool = False) -> bool:
    """Return whether random days on models with windows fail with this message."""

    def day(scenario: Scenario) -> None:
        scenario = conversing(scenario) if conversations else scenario
        run(replace(scenario, setup=replace(scenario.setup, sliding_window=16, caching=True)))

    return days.hunt(day, message)


@pytest.fixture
def too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_of = Windows.blocks_of

    def older(self: Any, request_id: str, end: int) -> Any:
        groups = blocks_of(self, request_id, end)
        return {
            group: replace(part, tail=part.tail[:1] + part.tail[:-1])
            for group, part in groups.items()
        }

    monkeypatch.setattr(Windows, "blocks_of", older)


@pytest.mark.usefixtures("too_old")
@pytest.mark.parametrize("point", [100, 104])
def test_blocks_of_a_window_that_ended_before(point: int) -> None:
    with pytest.raises(AssertionError, match=STALE):
        test_windows.test_a_second_request_computes_only_what_follows_the_point(
            SYNC, dict(sliding_window=20), 1, point
        )


@pytest.mark.usefixtures("too_old")
@pytest.mark.parametrize("conversations", [False, True])
def test_random_days_with_blocks_of_a_window_that_ended_before(conversations: bool) -> None:
    assert caught(STALE, conversations)


def test_a_store_that_is_found_without_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    def intact(self: PublishedStore) -> bool:
        parts = [part for part in self.groups.values() if part.store]
        own = {block.block_id for part in parts for block in (*part.store, *part.tail)}
        return all(b.block_hash == mark for b, mark in self.hashes if b.block_id in own)

    monkeypatch.setattr(PublishedStore, "intact", property(intact))
    with pytest.raises(AssertionError):
        test_windows.test_a_store_whose_window_was_taken_by_others_is_computed(SYNC)


def test_what_was_computed_over_a_store_without_its_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SuffixCache, "_reaches", lambda *_: True)
    with pytest.raises(AssertionError):
        test_windows.test_a_turn_continues_where_its_window_is_whole(SYNC)

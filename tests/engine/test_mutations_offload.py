"""The accounting tests fail when a rule of vLLM's offload beside eviction is broken."""

from dataclasses import replace
from random import Random

import pytest
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from tests.engine import days, offloaded
from tests.engine.scenarios import Scenario, run
from vllm_kvevict.engine.offload import OffloadGuard

pytestmark = pytest.mark.nightly

SETTLE = OffloadGuard.settle
WRONG = "overwritten or never computed|holds something else|never heard|was not replayed"


def day(scenario: Scenario) -> None:
    """A day with offload on which prompts are asked again, the last ones or lately."""
    setup = replace(
        scenario.setup, offload=600, memory=0, caching=True, sliding_window=None, audit=0.0
    )
    events = []
    for number, event in enumerate(scenario.events):
        events += [event, ("steps", 4), ("lose", -1 - number % 4, 3)]
    run(replace(scenario, setup=setup, events=events))


def caught(message: str) -> bool:
    """Whether random days with offload end with this message."""
    return days.hunt(day, message)


def test_accounting_catches_an_eviction_before_its_copies(monkeypatch):
    def unsettled(self, evictions):
        SETTLE(self, evictions)
        return set()

    monkeypatch.setattr(OffloadGuard, "settle", unsettled)
    assert caught(WRONG)


def test_accounting_catches_survivors_where_others_are_copied_from(monkeypatch):
    def own(self, evictions):
        mine = [self._status(eviction.request_id) for eviction in evictions]
        jobs = {job for status in mine for job in status.transfer_jobs}
        return SETTLE(self, evictions) & jobs

    monkeypatch.setattr(OffloadGuard, "settle", own)
    # Requests end before their prompts are copied.
    monkeypatch.setattr(offloaded, "LATE", 40)
    assert caught(WRONG)


def test_accounting_catches_what_is_stored_after_an_eviction(monkeypatch):
    def settle(self, evictions):
        jobs = SETTLE(self, evictions)
        for eviction in evictions:
            self._status(eviction.request_id).max_offload_tokens = None
        return jobs

    monkeypatch.setattr(OffloadGuard, "settle", settle)
    assert caught(WRONG)


def test_accounting_catches_what_is_stored_over_a_store(monkeypatch):
    monkeypatch.setattr(OffloadGuard, "looked_up", lambda self, state: None)
    assert caught(WRONG)


def test_accounting_catches_a_load_that_covers_the_window(monkeypatch):
    monkeypatch.setattr(OffloadGuard, "_max_loaded", lambda *args: None)
    assert caught("a hit covers the window")


class Refusals:
    """Memory refuses half of what vLLM would store, which asks again in later steps.

    A day draws its refusals from its own seed: hypothesis plays a day that failed once more.
    """

    def __init__(self) -> None:
        self.count = 0
        self._rng = Random()

    def day(self, scenario: Scenario) -> None:
        self._rng = Random(scenario.seed)
        day(scenario)

    def refuses(self) -> bool:
        refused = self._rng.random() < 0.5
        self.count += refused
        return refused


@pytest.fixture
def refusals(monkeypatch):
    refusals, prepare = Refusals(), CPUOffloadingManager.prepare_store

    def prepared(self, keys, context):
        return None if refusals.refuses() else prepare(self, keys, context)

    monkeypatch.setattr(CPUOffloadingManager, "prepare_store", prepared)
    return refusals


def test_what_is_refused_is_harmless(refusals):
    days.play(refusals.day, 12)
    assert refusals.count > 100


def test_accounting_catches_what_was_refused_and_is_stored_after_an_eviction(refusals, monkeypatch):
    """Without refusals all tokens up to an eviction are stored when it comes."""

    def settle(self, evictions):
        jobs = SETTLE(self, evictions)
        for eviction in evictions:
            self._status(eviction.request_id).max_offload_tokens = eviction.num_tokens
        return jobs

    monkeypatch.setattr(OffloadGuard, "settle", settle)
    assert days.hunt(refusals.day, WRONG)

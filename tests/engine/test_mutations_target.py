"""The accounting tests fail when a rule of budgets by target is broken. Each test breaks one."""

from dataclasses import replace

import pytest

from tests.engine import days, test_target
from tests.engine.scenarios import Scenario, aiming, falling_short, run
from tests.engine.test_scheduler import SYNC
from vllm_kvevict.schedule.request_timeline import RequestTimeline
from vllm_kvevict.target import ladder, trials
from vllm_kvevict.target.choice import Targets
from vllm_kvevict.target.ladder import Ladder
from vllm_kvevict.target.stairs import Stairs
from vllm_kvevict.target.trials import Trials


def day(scenario: Scenario) -> None:
    run(aiming(scenario))


def caught(message: str) -> bool:
    """Whether random days with a target end with this message."""
    return days.hunt(day, message, examples=120)


def test_accounting_catches_a_window_before_its_budget(monkeypatch):
    monkeypatch.setattr(Targets, "clip", lambda self, request_id, start, end, running: end)
    assert caught("has no budget, and computes its window")


@pytest.mark.nightly
def test_accounting_catches_the_first_budget_that_is_heard(monkeypatch):
    def first(self: Ladder):
        heard = [rung for rung in self.rungs if self.nats.get(rung.share, 1e9) <= self.target]
        return heard[-1] if heard else None

    monkeypatch.setattr(Ladder, "passed", property(first))
    assert caught("a smaller passed")


def test_accounting_catches_a_budget_that_loses_too_much(monkeypatch):
    def any_of_them(self: Ladder):
        return next((rung for rung in self.rungs if rung.share in self.nats), None)

    monkeypatch.setattr(Ladder, "passed", property(any_of_them))
    assert caught("a budget that loses too much")


def test_a_day_catches_trials_that_hold_on_to_their_blocks(monkeypatch):
    """vLLM preempts the last that began, on most days a trial: then nobody else is."""
    monkeypatch.setattr(Trials, "make_way", lambda self, missing: [])
    with pytest.raises(AssertionError, match="what trials held was enough"):
        test_target.test_trials_make_way_for_clients(replace(SYNC, **test_target.SERVER))


@pytest.mark.nightly
def test_accounting_catches_ladders_of_requests_that_are_gone(monkeypatch):
    monkeypatch.setattr(Targets, "_leave", lambda self, ladder: None)
    assert caught("something is left of a target")


@pytest.mark.nightly
def test_accounting_catches_a_request_that_waits_for_ever(monkeypatch):
    monkeypatch.setattr(Targets, "_give_up", lambda self, held: None)
    assert caught("livelock|no token in")


@pytest.mark.nightly
def test_accounting_catches_trials_of_another_budget(monkeypatch):
    def larger(options, **changes):
        return original(options, **changes | {"budget": "50%"})

    original = trials.replace
    monkeypatch.setattr(trials, "replace", larger)
    assert caught("a store of another budget")


def short_day(scenario: Scenario) -> None:
    run(falling_short(scenario))


def caught_short(message: str) -> bool:
    """Whether random days in which blocks fall short end with this message."""
    return days.hunt(short_day, message, examples=40)


def test_accounting_catches_steps_down_at_any_loss(monkeypatch):
    monkeypatch.setattr(ladder, "WORST", 10**9)
    assert caught_short("a step down that loses too much")


def test_accounting_catches_a_preempted_request_that_stays_down(monkeypatch):
    monkeypatch.setattr(Stairs, "preempted", lambda self, request_id: None)
    assert caught_short("has lost its blocks, and stays at")


@pytest.mark.nightly
def test_accounting_catches_two_rungs_at_once(monkeypatch):
    def lowest(self: Ladder):
        return self.rungs[0].share if below.fget(self) is not None else None

    below = Ladder.below
    monkeypatch.setattr(Ladder, "below", property(lowest))
    assert caught_short("goes from")


@pytest.mark.nightly
def test_accounting_catches_steps_down_while_there_are_blocks(monkeypatch):
    monkeypatch.setattr(Stairs, "begin_step", lambda self: self.may_lower)
    assert caught_short("goes down, and blocks are not short")


@pytest.mark.nightly
def test_accounting_catches_stores_that_stay_as_large(monkeypatch):
    monkeypatch.setattr(RequestTimeline, "under", lambda self, rule: self)
    assert caught_short("a store of another budget|goes from")

"""The tests of growing conversations fail when a rule is broken. Each test breaks one."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engine import days, test_chains
from tests.engine.cases import ASYNC, SYNC, hit
from tests.engine.scenarios import Scenario, conversing, run
from vllm_kvevict.engine import chain, stores
from vllm_kvevict.engine.request import RequestState

pytestmark = pytest.mark.nightly


def caught(message: str) -> bool:
    """Whether random days of conversations end with this message."""

    def day(scenario: Scenario) -> None:
        run(conversing(scenario))

    return days.hunt(day, message)


@pytest.fixture
def without_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    link_key = chain.link_key

    def alone(*args: Any) -> Any:
        key = link_key(*args)
        return key and replace(key, parent=b"")

    monkeypatch.setattr(chain, "link_key", alone)


@pytest.mark.usefixtures("without_parents")
def test_a_key_without_that_of_the_store_before() -> None:
    with pytest.raises(AssertionError):
        test_chains.test_a_store_after_others_is_another_than_a_first_one_at_the_same_position(SYNC)


@pytest.mark.usefixtures("without_parents")
def test_random_days_with_keys_without_that_of_the_store_before() -> None:
    assert caught("a store of other tokens")


def test_a_block_of_an_answer_that_was_published_before_it_was_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last token of an answer was sampled, but never computed."""

    def turn(setup: Any) -> int:
        core = test_chains.conversations(setup)
        former = core.add(test_chains.tokens(150), 58)
        core.finish()
        assert former.num_tokens % 8 == 0
        second = test_chains.say(core, former, 30, 4)
        found = hit(core.step(), second)
        core.finish()
        assert found < former.num_tokens
        return found

    assert turn(SYNC) == turn(ASYNC) == 200
    finished = stores.PublishedStores.request_finished

    def early(self: Any, state: RequestState) -> bool:
        result = finished(self, state)
        self.suffixes.note(state, state.request.num_tokens)
        self.suffixes.publish()
        return result

    monkeypatch.setattr(stores.PublishedStores, "request_finished", early)
    for setup in (SYNC, ASYNC):
        with pytest.raises(AssertionError, match="never computed"):
            turn(setup)


def test_an_eviction_that_ran_late_is_no_store_of_the_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain.Link, "is_of", lambda self, key: True)
    with pytest.raises(AssertionError):
        test_chains.test_an_eviction_that_ran_late_is_no_store_of_the_chain()


def test_keys_without_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    link_key = chain.link_key

    def unsalted(request: Any, *args: Any) -> Any:
        key = link_key(request, *args)
        return key and replace(key, prefix=b"", rest=tuple(request.all_token_ids[: key.point]))

    monkeypatch.setattr(chain, "link_key", unsalted)
    assert caught("a store of other tokens")

"""What LMCache is told to save after a load that failed, on a pretended connector."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvevict.rules.step_plan import STEPS_AHEAD
from vllm_kvevict.worker import failed_loads
from vllm_kvevict.worker.failed_loads import FailedLoads

BLOCK = 4


def request(*blocks: int) -> Any:
    """What LMCache is to save of a request with these blocks, of which the last is half full."""
    slots = torch.cat([torch.arange(BLOCK) + block * BLOCK for block in blocks])[:-2]
    save = SimpleNamespace(can_save=True, skip_leading_tokens=0)
    tokens = list(range(len(slots)))
    return SimpleNamespace(token_ids=tokens, slot_mapping=slots, save_spec=save, blocks=blocks)


class Connector:
    """Saves what it is told to, and forgets what it has reported, as LMCache does."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.fails: set[int] = set()
        self.saved: list[tuple[int, ...]] = []
        self._failed: set[int] = set()

    def _get_connector_metadata(self) -> Any:
        return SimpleNamespace(requests=self.requests)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._failed, self.fails = self.fails, set()

    def wait_for_save(self) -> None:
        for one in self.requests:
            if one.save_spec and one.save_spec.skip_leading_tokens < len(one.token_ids):
                assert one.save_spec.can_save
                self.saved.append(one.blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


def step(
    loads: FailedLoads, connector: Any, *requests: Any, ahead: int = 0, fails: tuple[int, ...] = ()
) -> tuple[list[tuple[int, ...]], set[int]]:
    """Run a step; returns what it saves and the blocks that it reports."""
    connector.requests, connector.fails, connector.saved = list(requests), set(fails), []
    output: Any = SimpleNamespace(has_sync_kv_loads=bool(fails), **{STEPS_AHEAD: ahead})
    loads.begin_step(output)
    connector.start_load_kv(None)
    connector.wait_for_save()
    return connector.saved, connector.get_block_ids_with_load_errors()


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The connector of a worker that is alone."""
    monkeypatch.setattr(failed_loads, "union_of_ranks", lambda values: values)
    return Connector()


def test_requests_that_read_a_lost_block_are_not_saved(connector: Any) -> None:
    loads = FailedLoads(connector, BLOCK)
    idle = request(2)
    idle.save_spec = None
    requests = request(1, 2, 3), request(1, 4), request(7, 2), idle
    assert step(loads, connector, *requests, fails=(2,)) == ([(1, 4)], {2})


@pytest.mark.parametrize("ahead", [1, 2])
def test_until_the_first_step_that_was_planned_after_the_report(connector: Any, ahead: int) -> None:
    """Then others have the blocks. As many steps are planned ahead as the engine has in flight."""
    loads = FailedLoads(connector, BLOCK)
    assert step(loads, connector, request(1), ahead=ahead) == ([(1,)], set())
    assert step(loads, connector, request(1, 2), ahead=ahead, fails=(2,)) == ([], {2})
    for _ in range(ahead):
        assert step(loads, connector, request(1, 2), request(3), ahead=ahead) == ([(3,)], set())
    assert step(loads, connector, request(5, 2), ahead=ahead) == ([(5, 2)], set())


def test_what_another_rank_could_not_load_is_in_the_hidden_states(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def union(values: set[int]) -> set[int]:
        asked.append(set(values))
        return values | {9}

    monkeypatch.setattr(failed_loads, "union_of_ranks", union)
    loads = FailedLoads(connector, BLOCK)
    requests = request(1, 2), request(9), request(3)
    assert step(loads, connector, *requests, fails=(2,)) == ([(3,)], {2})
    step(loads, connector, *requests)
    assert asked == [{2}], "ranks wait for each other in steps that load only"

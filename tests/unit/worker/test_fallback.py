"""A policy of another package that fails: its evictions run, by what needs no scores."""

import logging
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from tests.models import random_prompt
from tests.oracles.engine import engine
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.metrics.report import Reporter
from vllm_kvevict.policies.base import Candidates, Policy, Scorer
from vllm_kvevict.worker import fallback

SETTINGS = dict(policy="streaming-llm", budget=96, interval=32, options=dict(sinks=0))
PROMPT = random_prompt(400, seed=1)
ASKED = {"kv_eviction_protect_first": 20}


class Foreign(Scorer):
    """Not of this package."""

    needs_window = False

    def __init__(self, fails: Any = None) -> None:
        self.fails, self.calls = fails, 0

    def scores(self, candidates: Candidates) -> torch.Tensor:
        self.calls += 1
        if self.fails is None:
            raise RuntimeError("a bug of somebody else's")
        return self.fails(candidates)


class Crossing(Foreign):
    crosses_ranks: ClassVar[bool] = True


def answer(model: Any, scorer: Scorer | None) -> tuple[Any, int, int]:
    """Tokens, evictions, and how many of them the worker has counted as failures."""
    with engine(model, SETTINGS) as run:
        worker = run.worker.kv_eviction
        failures: list[float] = []
        take = worker.meter.take

        def taken() -> Any:
            measured = take()
            failures.extend((measured or {}).get("failed", []))
            return measured

        worker.meter.take = taken
        if scorer is not None:
            (name,) = worker.policies
            worker.policies = {name: replace(worker.policies[name], scorer=scorer)}
        free = run.free_blocks()
        tokens = run.generate([PROMPT], 70, [ASKED])
        assert run.free_blocks() == free
        assert run.counters.evictions_prefill == 1 and run.counters.evictions_decode >= 1
        return tokens, run.counters.evictions, len(failures)


@pytest.fixture(scope="module")
def expected(tiny_model) -> Any:
    """What streaming-llm says, which keeps the protected and the most recent tokens by itself."""
    tokens, _, failures = answer(tiny_model, None)
    assert failures == 0
    return tokens


@pytest.mark.parametrize(
    "fails",
    [
        None,
        lambda c: torch.zeros(c.num_heads, c.num_candidates + 1),
        lambda c: torch.zeros(c.num_candidates),
        lambda c: "no tensor",
    ],
)
def test_the_engine_goes_on_with_the_most_recent_tokens(tiny_model, expected, fails, caplog):
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        tokens, evictions, failures = answer(tiny_model, Foreign(fails))
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert tokens == expected
    assert failures == evictions >= 2
    logged = [r for r in caplog.records if "failed; its evictions keep" in r.getMessage()]
    assert len(logged) == 1 and logged[0].exc_info is not None


def test_what_is_ours_or_makes_others_wait_is_not_replaced(monkeypatch):
    from vllm_kvevict.policies.snapkv import SnapKV
    from vllm_kvevict.policies.subgen_stream import SubGenStream

    monkeypatch.setattr(fallback, "get_tensor_model_parallel_world_size", lambda: 1)
    assert not fallback.replaceable(SnapKV()), "a bug of ours is to be seen"
    assert fallback.replaceable(Foreign()) and fallback.replaceable(Crossing())
    weighted = type("Theirs", (SubGenStream,), {"__module__": "theirs"})
    assert not fallback.replaceable(object.__new__(weighted))
    monkeypatch.setattr(fallback, "get_tensor_model_parallel_world_size", lambda: 2)
    assert fallback.replaceable(Foreign()) and not fallback.replaceable(Crossing())
    # So that no rank is left inside a collective by one that does not come there.
    monkeypatch.setattr(fallback, "mean_of_ranks", lambda tensor: tensor + 1)
    with pytest.raises(RuntimeError, match="crosses_ranks"):
        fallback.mean_for(Foreign(), torch.zeros(1))
    assert fallback.mean_for(Crossing(), torch.zeros(1)) == 1


def test_heads_that_kept_little_give_their_share_to_others():
    """Padding of 5 and 0 of 6 pages: the first head has one page for a store of three a head."""
    padding = torch.tensor([[5, 0]])
    scores, pages, columns = fallback.recent(padding, 6, 3, 4, 2)
    assert pages.tolist() == [[1, 5]]
    assert columns.tolist() == [[20, 21, 22, 23, 0, 1, *range(6, 24)]]
    assert scores.isneginf().sum() == 20


def test_a_failure_reaches_the_report():
    counters = Counters()
    reporter = Reporter(counters)
    reporter.measured(seconds=[0.1], head_spread=[], failed=[1.0, 1.0])
    report = reporter.take(0)
    assert report is not None and report.evictions_unscored == 2


def test_policies_log_once():
    failures = fallback.Failures()
    policy = Policy("mine", "", Foreign(), None)  # type: ignore[arg-type]
    for _ in range(3):
        failures.note(policy, RuntimeError())
    assert failures._logged == {"mine"}

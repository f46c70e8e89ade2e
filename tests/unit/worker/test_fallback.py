"""A policy of another package that fails: its evictions keep the most recent tokens."""

import logging
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.metrics.report import Reporter
from vllm_kvevict.policies.base import Candidates, Requirements, Scorer
from vllm_kvevict.policies.snapkv import SnapKV
from vllm_kvevict.policies.subgen_stream import SubGenStream
from vllm_kvevict.worker import eviction

SETTINGS = dict(policy="streaming-llm", budget=96, interval=32, options=dict(sinks=0))
ADAPTIVE = dict(policy="ada-snapkv", budget=96, interval=32)
PROMPT = random_prompt(400, seed=1)
ASKED = {"kv_eviction_protect_first": 20}


class Foreign(Scorer):
    """Not of this package."""

    requirements: ClassVar[Requirements] = Requirements(window="none")

    def __init__(self, fails: Any = None) -> None:
        self.fails = fails

    def scores(self, candidates: Candidates) -> torch.Tensor:
        if self.fails is None:
            raise RuntimeError("a bug of another package")
        return self.fails(candidates)


class Crossing(Foreign):
    requirements: ClassVar[Requirements] = Requirements(window="none", crosses_ranks=True)


def answer(model: Any, settings: dict[str, Any], scorer: Scorer | None) -> tuple[Any, int, int]:
    """Tokens, evictions, and how many of them the worker has counted as failures."""
    with engine(model, settings) as run:
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
    """The tokens of streaming-llm, which keeps the protected and the most recent tokens itself."""
    tokens, _, failures = answer(tiny_model, SETTINGS, None)
    assert failures == 0
    return tokens


@pytest.mark.parametrize(
    ("settings", "fails"),
    [
        (SETTINGS, None),
        (ADAPTIVE, None),
        nightly(SETTINGS, lambda c: torch.zeros(c.num_heads, c.num_candidates + 1)),
        nightly(SETTINGS, lambda c: torch.zeros(c.num_candidates)),
        (SETTINGS, lambda c: "no tensor"),
    ],
)
def test_the_engine_goes_on_with_the_most_recent_tokens(
    tiny_model, expected, settings, fails, caplog
):
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        tokens, evictions, failures = answer(tiny_model, settings, Foreign(fails))
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert tokens == expected
    assert failures == evictions >= 2
    logged = [r for r in caplog.records if f"policy {settings['policy']} failed" in r.getMessage()]
    assert len(logged) == 1 and logged[0].exc_info is not None


def test_which_scorers_are_replaced(monkeypatch):
    monkeypatch.setattr(eviction, "get_tensor_model_parallel_world_size", lambda: 1)
    assert not eviction.replaceable(SnapKV()), "an error of this package must be seen"
    assert eviction.replaceable(Foreign()) and eviction.replaceable(Crossing())
    weighted = type("Theirs", (SubGenStream,), {"__module__": "theirs"})
    assert not eviction.replaceable(object.__new__(weighted)), "attention would lack its weights"
    monkeypatch.setattr(eviction, "get_tensor_model_parallel_world_size", lambda: 2)
    assert eviction.replaceable(Foreign()) and not eviction.replaceable(Crossing())


def test_a_failure_reaches_the_report():
    counters = Counters()
    reporter = Reporter(counters)
    reporter.measured(seconds=[0.1], head_spread=[], failed=[1.0, 1.0])
    report = reporter.take(0)
    assert report is not None and report.evictions_unscored == 2

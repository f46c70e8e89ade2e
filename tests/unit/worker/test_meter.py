"""What a worker measures, and how it travels with the model runner's output."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_kvevict.metrics.counters import Counters
from vllm_kvevict.metrics.report import MEASURED, Reporter
from vllm_kvevict.rules.step_plan import Replay
from vllm_kvevict.worker import meter as meter_module
from vllm_kvevict.worker.meter import SAMPLE_EVERY, EvictionMeter, attach, head_spread


@given(st.lists(st.lists(st.integers(1, 40), min_size=3, max_size=3), min_size=1, max_size=5))
def test_head_spread(pages):
    expected = sum(max(layer) * len(layer) / sum(layer) for layer in pages) / len(pages)
    assert float(head_spread(torch.tensor(pages))) == pytest.approx(expected)


def test_seconds_of_every_eviction_and_a_sample_of_heads(monkeypatch):
    now = iter(range(0, 10_000, 3))  # every look at the clock is 3 seconds after the last
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: float(next(now)))
    meter = EvictionMeter(torch.device("cpu"))
    assert meter.take() is None
    for index in range(2 * SAMPLE_EVERY + 1):
        with meter.evictions(1):
            meter.pages(torch.tensor([[1, 3]]))  # two groups: 1.5 and 1 on average
            meter.pages(torch.tensor([[2, 2]]))
        if index == 0:
            assert meter.take() == {"seconds": [3.0], "head_spread": [1.25]}
    assert meter.take() == {"seconds": [3.0] * 2 * SAMPLE_EVERY, "head_spread": [1.25, 1.25]}
    assert meter.take() is None


def test_seconds_of_stores_that_come_back(monkeypatch):
    now = iter([10.0, 12.0, 20.0, 25.0])
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: next(now))
    meter = EvictionMeter(torch.device("cpu"))
    for tier in ("file", "memory"):
        with meter.restore(tier):
            pass
    counters = Counters()
    taken = meter.take()
    assert taken is not None and meter.take() is None
    Reporter(counters).measured(**taken)
    assert (counters.seconds_restored_file, counters.seconds_restored_memory) == (2.0, 5.0)


def test_what_was_compared_arrives_when_the_host_can_read_it():
    meter = EvictionMeter(torch.device("cpu"))
    meter.compared(Replay("x", "a", "tova", 0.25, 68, 100), torch.tensor([0.5, 0.75]))
    assert meter.take() == {
        "seconds": [],
        "head_spread": [],
        "audits": [("a", "tova", 0.25, 0.5, 0.75)],
    }
    assert meter.take() is None


class Late(AsyncModelRunnerOutput):
    def get_output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(["a"], {"a": 0})

    def get_kv_connector_output(self) -> str:
        return "of the connector"


MINE = {"seconds": [0.5], "head_spread": []}


@pytest.mark.parametrize("output", [ModelRunnerOutput(["a"], {"a": 0}), Late()])
def test_values_travel_with_the_output(output):
    sent = attach(MINE, output)
    arrived = sent.get_output() if isinstance(sent, AsyncModelRunnerOutput) else sent
    arrived = pickle.loads(pickle.dumps(arrived))
    assert getattr(arrived, MEASURED) == MINE
    assert arrived.req_ids == ["a"]


def test_what_a_failed_step_leaves_is_passed_on():
    """vLLM 0.33 asks for it, and makes no output of a class that has no answer."""
    assert attach(MINE, Late()).get_kv_connector_output() == "of the connector"


def test_outputs_that_carry_nothing():
    output = Late()
    assert attach(None, output) is output
    assert attach(MINE, "tensors for the next stage") == "tensors for the next stage"
    sent = attach(MINE, EMPTY_MODEL_RUNNER_OUTPUT)
    assert getattr(sent, MEASURED) == MINE
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, MEASURED), "it is shared by all steps"

"""When a step's evictions run: behind the sampling, so that no token waits for them."""

from types import SimpleNamespace

import pytest
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker.gpu_worker import Worker

from tests.kernels.evict import run, steps, worker
from vllm_kvevict.rules.step_plan import PLAN
from vllm_kvevict.worker.mixin import EvictionWorkerMixin

POLICY = "ada-snapkv"


class Samples(Worker):
    """vLLM's worker; a step without tokens has its output at once."""

    def execute_model(self, scheduler_output):
        self.log.append("forward")
        if scheduler_output.fails:
            raise RuntimeError("out of memory")
        return EMPTY_MODEL_RUNNER_OUTPUT if scheduler_output.empty else None

    def sample_tokens(self, grammar_output):
        self.log.append("sample")
        return EMPTY_MODEL_RUNNER_OUTPUT


class Evicts(EvictionWorkerMixin, Samples):
    _register_backend = _layer_cache = _failed_loads = None


@pytest.fixture
def made(one_rank, monkeypatch):
    made = Evicts.__new__(Evicts)
    made.log = []
    made.kv_eviction = worker(POLICY, fused=False)
    evict = made.kv_eviction._evict
    monkeypatch.setattr(
        made.kv_eviction,
        "_evict",
        lambda eviction: (made.log.append(eviction.request_id), evict(eviction)),
    )
    return made


def step(plan, empty=False, fails=False):
    return SimpleNamespace(**{PLAN: plan}, empty=empty, fails=fails)


def test_evictions_follow_the_sampling(made):
    first, second = steps(POLICY)
    for plan in (first, second):
        assert made.execute_model(step(plan)) is None
        made.sample_tokens(None)
    assert made.log == ["forward", "sample", "a", "b", "forward", "sample", "a", "c"]


def test_a_step_that_does_not_sample_evicts_at_once(made):
    output = made.execute_model(step(steps(POLICY)[0], empty=True))
    assert made.log == ["forward", "a", "b"]
    assert output is not EMPTY_MODEL_RUNNER_OUTPUT  # it carries what was measured


def test_a_rank_that_is_not_asked_to_sample_evicts_before_its_next_step(made):
    first, second = steps(POLICY)
    made.execute_model(step(first))
    made.execute_model(step(second))
    made.sample_tokens(None)
    assert made.log == ["forward", "a", "b", "forward", "sample", "a", "c"]
    plain = worker(POLICY, fused=False)
    run(plain, [first, second])
    assert plain.states[0].tail_start.tolist() == made.kv_eviction.states[0].tail_start.tolist()


def test_a_step_that_failed_evicts_nothing(made):
    with pytest.raises(RuntimeError, match="out of memory"):
        made.execute_model(step(steps(POLICY)[0], fails=True))
    made.sample_tokens(None)
    assert made.log == ["forward", "sample"] and not made.kv_eviction.evictions

"""After sleep, release of the KV cache and wake-up in any order, tokens are a fresh engine's.

Memory is that of a pretended allocator, which loses, restores and guards it as vLLM's does on a
GPU.
"""

import pytest

from tests.e2e.sleep_orders import random_calls, sleepy
from tests.e2e.test_gpu_on_cpu import ran
from tests.models import cached_tiny_llama, random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from tests.profiles import random_profile
from vllm_kvevict.serving import activate

PROMPTS = [random_prompt(n, seed=n) for n in (400, 150)]
NEW_TOKENS = 40
OPTIONS = dict(max_num_batched_tokens=256, max_model_len=1024, max_num_seqs=4)


@pytest.fixture
def sleeping(monkeypatch):
    worker = "tests.e2e.sleeping.EvictingSleepingWorker"
    monkeypatch.setitem(activate.WORKERS, "vllm.v1.worker.cpu_worker.CPUWorker", worker)


@pytest.mark.usefixtures("sleeping")
@pytest.mark.parametrize("policy", ["ada-probe", nightly("h2o"), nightly("ada-defensive")])
def test_answers_after_any_order(tiny_model_kv4, tmp_path, policy):
    settings = dict(policy=policy, budget=128, interval=32)
    if policy == "ada-probe":
        settings["profile"] = str(random_profile(tmp_path, tiny_model_kv4)[0])
    with engine(tiny_model_kv4, settings, enable_prefix_caching=True, **OPTIONS) as run:
        expected = run.generate(PROMPTS, NEW_TOKENS)
        evictions = run.counters.evictions
        assert evictions >= 4
        for seed in range(12):
            done = sleepy(run, tiny_model_kv4, random_calls(seed, 5))
            assert run.generate(PROMPTS, NEW_TOKENS) == expected, done
            assert run.counters.evictions == evictions * (seed + 2)


@pytest.mark.slow
def test_answers_of_a_pretended_gpu():
    """Constants of attention lie in the memory that is lost: query starts, counters, rotations."""
    model = cached_tiny_llama(layers=1, kv_heads=2, heads=4, head_dim=64)
    result = ran("triton", "0", "tests.e2e.gpu_sleep_script", str(model), "int4")
    assert result["same"] == [True, True]
    assert result["evictions"] >= 1 and result["total"] == 3 * result["evictions"]

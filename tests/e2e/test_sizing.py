"""The sizing command says beforehand what a real start-up then logs."""

import re

import pytest

from tests.e2e.architectures import architecture
from tests.hardware import FP8_CACHE
from tests.models import random_prompt
from tests.nightly import nightly
from tests.oracles.engine import engine
from vllm_kvevict.tools.plan.options import parse
from vllm_kvevict.tools.plan.report import Sizing, as_json

SIZES = re.compile(r"memory on this rank: (\d+) bytes [^,]*, (\d+) bytes [^,]*, (\d+) bytes")


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What the worker logs; vLLM drops the handlers of its loggers whenever it configures them."""
    from vllm_kvevict.worker.mixin import logger

    found: list[str] = []
    monkeypatch.setattr(logger, "info", lambda message, *args: found.append(message % args))
    return found


COMMON = [
    "--dtype", "float32", "--block-size", "32", "--max-num-seqs", "24",
    "--max-num-batched-tokens", "2048", "--kv-eviction", "ada-snapkv",
]  # fmt: skip


def plan(model, *arguments: str) -> dict:
    return as_json(Sizing.of(*parse([str(model), *COMMON, *arguments])))


@pytest.mark.parametrize(
    "policy, budget",
    [
        ("ada-snapkv", 256),
        nightly("h2o", 256),
        nightly("streaming-llm", "25%"),
        nightly("ada-pyramid", 256),
    ],
)
def test_a_llama(policy, budget, said, tiny_model_kv4):
    load = ["--prompt", "1500", "--output", "100"]
    memory = ["--kv-cache-memory-bytes", "32M", "--max-model-len", "2048"]
    asked = ["--kv-eviction", policy, "--budget", str(budget)]
    planned = plan(tiny_model_kv4, *load, *memory, *asked)
    settings = dict(policy=policy, budget=budget)
    options = dict(kv_cache_memory_bytes=32 << 20, max_model_len=2048)
    check_start_up(planned, said, tiny_model_kv4, settings, **options)


@pytest.mark.nightly
@FP8_CACHE
def test_an_fp8_cache(said, tiny_model_kv4):
    load = ["--prompt", "1500", "--output", "100", "--budget", "256", "--max-model-len", "2048"]
    memory = ["--kv-cache-memory-bytes", "32M", "--kv-cache-dtype", "fp8"]
    planned = plan(tiny_model_kv4, *load, *memory)
    options = dict(kv_cache_memory_bytes=32 << 20, max_model_len=2048, kv_cache_dtype="fp8")
    check_start_up(planned, said, tiny_model_kv4, dict(policy="ada-snapkv", budget=256), **options)
    whole = plan(tiny_model_kv4, *load, *memory[:2])["memory"]
    assert planned["memory"]["capacity_tokens"] == 4 * whole["capacity_tokens"]


def test_layers_with_sliding_windows(said, tmp_path):
    path = architecture("Gemma2", tmp_path)
    planned = plan(
        path, "--prompt", "600", "--output", "100", "--kv-cache-memory-bytes", "16M",
        "--budget", "128",
    )  # fmt: skip
    settings = dict(policy="ada-snapkv", budget=128)
    check_start_up(planned, said, path, settings, kv_cache_memory_bytes=16 << 20)


@pytest.mark.nightly
def test_a_latent_cache(said, tmp_path):
    path = architecture("DeepseekV2", tmp_path)
    load = ["--prompt", "600", "--output", "100", "--kv-cache-memory-bytes", "64M"]
    planned = plan(path, *load, "--kv-eviction", "snapkv", "--budget", "128")
    # 16 tokens of 512 + 64 numbers of 4 bytes, in four layers.
    assert planned["memory"]["blocks"] == (64 << 20) // (16 * 576 * 4 * 4)
    settings = dict(policy="snapkv", budget=128)
    check_start_up(planned, said, path, settings, kv_cache_memory_bytes=64 << 20)


def check_start_up(planned, said, model, settings, **options) -> None:
    """Start the engine; compare with what it says and holds, and serve the planned load."""
    # Whose defaults are those of ``LLM``, not of a server.
    sizes = dict(max_num_seqs=24, max_num_batched_tokens=2048)
    with engine(model, settings, enable_prefix_caching=True, **sizes, **options) as run:
        memory = planned["memory"]
        (logged,) = [found for line in said if (found := SIZES.search(line))]
        assert [int(size) for size in logged.groups()] == [
            memory["eviction_rings"],
            memory["eviction_tables"],
            memory["eviction_token_stats"],
        ]
        config = run.core.vllm_config
        cache = config.cache_config
        assert cache.num_gpu_blocks == memory["blocks"]
        # vLLM logs these two, but equal lines only once a process.
        assert cache.kv_cache_size_tokens == memory["capacity_tokens"]
        assert cache.kv_cache_max_concurrency == memory["concurrency"]
        assert config.scheduler_config.max_num_seqs == planned["max_num_seqs"]
        rings = run.scheduler._turns.slots
        assert (rings.count if rings else 0) == memory["eviction_ring_slots"]
        caches = {
            storage.data_ptr(): storage.nbytes()
            for layer in config.compilation_config.static_forward_context.values()
            if hasattr(layer, "kv_cache")
            for storage in [layer.kv_cache.untyped_storage()]
        }
        assert sum(caches.values()) == memory["kv_cache"]
        run.generate([random_prompt(planned["prompt"], seed=1)], planned["output"])
        assert run.counters.evictions == planned["with_eviction"]["evictions"] >= 1

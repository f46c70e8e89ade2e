"""What layers that draft are refused with, on the configurations that vLLM builds."""

import copy
from typing import Any

import pytest

from tests.models import cached_tiny_llama
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.memory_budget import drafting_layers, ring_bytes
from vllm_kvevict.serving import support
from vllm_kvevict.serving.drafting import METHODS, UNTRIED, check_drafting

PLAIN = EvictionConfig(policy="snapkv")


def build(draft: dict[str, Any] | None = None, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    speculative = dict(
        method="draft_model", model=str(cached_tiny_llama(**draft or {})), num_speculative_tokens=2
    )
    return EngineArgs(
        model=str(cached_tiny_llama()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        speculative_config=speculative,
        additional_config={"kv_eviction": "snapkv"},
        **options,
    ).create_engine_config()


@pytest.fixture(scope="module")
def served() -> Any:
    return build()


def refused(config: Any, settings: EvictionConfig = PLAIN) -> str:
    with pytest.raises(ValueError) as caught:
        check_drafting(config, settings)
    message = str(caught.value)
    assert message.startswith("KV eviction does not support layers that draft (")
    assert ", because " in message and message.endswith(".") and ". " not in message
    return message.split(", because ")[0].split(") ", 1)[1]


def test_serves_a_draft_model_and_its_rings(served: Any) -> None:
    assert served.parallel_config.worker_cls == "vllm_kvevict.worker.cpu.EvictingCPUWorker"
    assert (
        served.scheduler_config.scheduler_cls == "vllm_kvevict.engine.scheduler.EvictingScheduler"
    )
    assert drafting_layers(served) == 4
    # Layers of both, a window of 32, 8 query heads of 32 float32 numbers.
    assert ring_bytes(served, PLAIN) == 8 * 32 * 8 * 32 * 4


@pytest.mark.parametrize(
    "draft", [dict(kv_heads=4), dict(heads=4), dict(head_dim=64, heads=4)], ids=str
)
def test_refuses_heads_of_another_shape(draft: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="with another number or size of heads than the model"):
        build(draft)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (dict(policy="pyramidkv"), "pyramidkv or ada-pyramid"),
        (dict(policy="snapkv", allow="h2o"), "with h2o"),
        (dict(policy="subgen-stream"), "subgen-stream"),
        (dict(policy="snapkv", prefill_interval=256), "--kv-eviction-prefill-interval"),
        (dict(policy="snapkv", every=256), "--kv-eviction-every"),
        (dict(policy="snapkv", audit="1%"), "--kv-eviction-audit"),
        (dict(policy="snapkv", store_memory="1G"), "--kv-eviction-store-memory"),
        (dict(policy="snapkv", store_dtype="int4"), "--kv-eviction-store-dtype"),
    ],
)
def test_refuses_settings(served: Any, settings: dict[str, Any], what: str) -> None:
    check_drafting(served, PLAIN)
    assert what in refused(served, EvictionConfig(**settings))


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("scheduler_config.async_scheduling", True, "async scheduling"),
        ("parallel_config.world_size", 2, "parallelism"),
        ("parallel_config.data_parallel_size", 2, "parallelism"),
        ("lora_config", object(), "--enable-lora"),
        ("cache_config.cache_dtype", "fp8_e4m3", "--kv-cache-dtype fp8"),
        ("speculative_config.kv_cache_dtype", "fp8", "--kv-cache-dtype fp8"),
        ("speculative_config.parallel_drafting", True, "in parallel"),
        (
            "model_config.hf_text_config.num_kv_shared_layers",
            1,
            "in models with layers that do not evict",
        ),
    ],
)
def test_refuses_what_was_not_tried(served: Any, path: str, value: Any, what: str) -> None:
    config = copy.deepcopy(served)
    *owners, name = path.split(".")
    owner = config
    for part in owners:
        owner = getattr(owner, part)
    object.__setattr__(owner, name, value)
    assert what in refused(config)


def test_refuses_other_runners(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert refused(served) == "on GPUs or by model runner V2"
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    check_drafting(served, PLAIN)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert refused(served) == "on GPUs or by model runner V2"


def test_refuses_images(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(served.model_config), "is_multimodal_model", True)
    assert refused(served) == "with images"


@pytest.mark.parametrize("way", ["use_gemma4_mtp", "use_step3p5_mtp", "use_multi_module_mtp"])
def test_refuses_other_ways_to_draft(
    served: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(type(served.speculative_config), way, lambda _: True)
    assert "by several modules" in refused(served)


def test_pressure_is_refused_as_with_all_drafts(served: Any) -> None:
    with pytest.raises(ValueError, match="pressure with speculative decoding"):
        support.check(served, EvictionConfig(policy="snapkv", when="pressure"))


def test_no_method_is_forgotten(served: Any) -> None:
    """What vLLM gives a cache of its own is served here or refused by name."""
    assert len({what for what, _ in UNTRIED}) == len(UNTRIED)
    for method in ("eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model"):
        config = copy.deepcopy(served)
        object.__setattr__(config.speculative_config, "method", method)
        if method in METHODS:
            support.check(config, PLAIN)
            continue
        with pytest.raises(ValueError, match="this method of speculative decoding"):
            support.check(config, PLAIN)

"""Which offload of vLLM's is served beside eviction, and what start-up says of the others."""

from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.unit.serving.configurations import NGRAM, Build, assert_sentence, build, refusal
from vllm_kvevict.serving import offload
from vllm_kvevict.serving.offload import OURS

__all__ = ["build"]


def transfer(**given: Any) -> dict[str, Any]:
    settings = dict(kv_connector="OffloadingConnector", kv_role="kv_both") | given
    return dict(kv_transfer_config=KVTransferConfig(**settings))


def extra(**given: Any) -> dict[str, Any]:
    return transfer(kv_connector_extra_config=dict(cpu_bytes_to_use=1 << 20, **given))


@pytest.mark.parametrize("options", [dict(kv_offloading_size=0.1), extra(), extra(**OURS)])
def test_host_memory_is_served(build: Build, options: Any) -> None:
    config = build(**options)
    given = config.kv_transfer_config.kv_connector_extra_config
    assert given["spec_name"] == "MainMemorySpec", "vLLM copies nothing on this platform"
    assert given["cpu_bytes_to_use"] > 0
    assert config.scheduler_config.scheduler_cls.startswith("vllm_kvevict.engine.scheduler")
    audited = build(**options, additional_config={"kv_eviction": dict(AUDIT)})
    assert audited.kv_transfer_config is not None


AUDIT = dict(policy="ada-snapkv", audit="1%")


@pytest.mark.parametrize(
    ("options", "what", "advice"),
    [
        (transfer(kv_role="kv_producer"), "vLLM's offload in this role", "--kv-transfer-config"),
        (
            extra(spec_name="TieringOffloadingSpec"),
            "this kind of KV offloading",
            "--kv-offloading-size",
        ),
        (extra(canonical_layout=True), "this kind of KV offloading", "--kv-transfer-config"),
        (
            dict(kv_offloading_size=0.1, enable_prefix_caching=False),
            "without prefix caching",
            "--no-enable-prefix-caching",
        ),
        (
            dict(kv_offloading_size=0.1, speculative_config=NGRAM),
            "with speculative decoding",
            "--speculative-config",
        ),
        (
            dict(kv_offloading_size=0.1, pipeline_parallel_size=2),
            "with pipeline parallelism",
            "--pipeline-parallel-size",
        ),
    ],
)
def test_others_are_refused(build: Build, options: Any, what: str, advice: str) -> None:
    message = refusal(build, **options)
    assert_sentence(message)
    assert what in message.split(", because ")[0] and advice in message.split("; ")[1]


def test_layers_that_do_not_evict_are_refused(build: Build) -> None:
    message = refusal(build, "Gemma3ForCausalLM", kv_offloading_size=0.1)
    assert_sentence(message)
    assert "with layers that do not evict" in message


def test_latent_caches_are_refused(build: Build) -> None:
    """vLLM has switched their prefix cache off: no flag of the user's brings it back."""
    message = refusal(build, "DeepseekV2ForCausalLM", kv_offloading_size=0.1)
    assert_sentence(message)
    assert "KV offloading of MLA models" in message
    for settings in (AUDIT, dict(policy="snapkv", store_memory="1G")):
        settings = dict(settings, policy="snapkv")
        options = dict(additional_config={"kv_eviction": settings}, enable_prefix_caching=True)
        message = refusal(build, "DeepseekV2ForCausalLM", **options)
        assert "vLLM on CPUs has none for MLA models; remove" in message
        assert "--no-enable-prefix-caching" not in message


def test_host_memory_for_stores_may_stand_beside_it(build: Build) -> None:
    tiers = dict(policy="ada-snapkv", store_memory="1G")
    config = build(kv_offloading_size=0.1, additional_config={"kv_eviction": tiers})
    assert config.scheduler_config.scheduler_cls.startswith("vllm_kvevict.engine.scheduler")


def test_every_refusal_is_a_sentence() -> None:
    for one in offload.REFUSALS:
        assert_sentence(one.sentence())


def test_without_it_nothing_changes(build: Build) -> None:
    config = build()
    assert config.kv_transfer_config is None
    assert config.scheduler_config.scheduler_cls.startswith("vllm_kvevict.engine.scheduler")

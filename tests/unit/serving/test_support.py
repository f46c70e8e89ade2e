"""What eviction refuses, on the configurations vLLM itself builds for the real architectures."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import MultiModalConfig

from tests.unit.serving.configurations import NGRAM, Build, assert_sentence, build, refusal
from tests.versions import MEDUSA, installed
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.memory_budget import evictable_layers
from vllm_kvevict.config.profile import Profile
from vllm_kvevict.serving import support
from vllm_kvevict.serving.few_bits import GPU_STORE_REFUSALS, XFORMERS
from vllm_kvevict.serving.identity import identity
from vllm_kvevict.serving.latent import LATENT_REFUSALS
from vllm_kvevict.serving.support import (
    GROUP_REFUSALS,
    INT8_REFUSALS,
    LEARNED_REFUSALS,
    PRESSURE_REFUSALS,
    REFUSALS,
    STORE_DTYPE_REFUSALS,
)

__all__ = ["build"]


@pytest.mark.parametrize(
    ("architecture", "what", "why"),
    [
        ("GlmMoeDsaForCausalLM", "sparse MLA models", "indexer keeps every token"),
        ("MiMoV2FlashForCausalLM", "values of another size than their keys", "of its own"),
        ("MambaForCausalLM", "models without full-attention layers", "without attention"),
        ("MistralForCausalLM", "models without full-attention layers", "has a sliding window"),
        ("BertModel", "pooling models", "generate no tokens"),
        ("WhisperForConditionalGeneration", "encoder-decoder models", "cross-attention"),
        ("BloomForCausalLM", "ALiBi", "at its own position"),
    ],
)
def test_refuses_model(build: Build, architecture: str, what: str, why: str) -> None:
    message = refusal(build, architecture)
    assert_sentence(message)
    assert f"support {what}" in message and why in message
    assert message.endswith("serve this model without --kv-eviction.")


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [("GptOssForCausalLM", 1), ("JambaForCausalLM", 2), ("Gemma3nForCausalLM", 1)],
)
def test_serves_sinks_recurrent_layers_and_shared_caches(
    build: Build, architecture: str, layers: int
) -> None:
    config = build(architecture)
    assert "kv_eviction" in config.additional_config
    assert evictable_layers(config) == layers


def test_serves_drafts_from_n_grams_but_beside_recurrent_layers(build: Build) -> None:
    assert "kv_eviction" in build(speculative_config=NGRAM).additional_config
    message = refusal(build, "JambaForCausalLM", speculative_config=NGRAM)
    assert_sentence(message)
    assert "of models with recurrent layers" in message
    message = refusal(build, "LlamaForCausalLM", speculative_config=NGRAM, pipeline_parallel_size=2)
    assert "speculative decoding with pipeline parallelism" in message


@pytest.mark.parametrize("method", ["ngram", pytest.param("medusa", marks=MEDUSA), "suffix"])
def test_drafts_without_a_cache_by_runner_and_scheduler(
    build: Build, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Async scheduling with them is vLLM's to refuse."""
    with pytest.raises(ValueError, match=r"(?i)async scheduling is (only|not) supported"):
        build(speculative_config=NGRAM, async_scheduling=True)
    config = build(speculative_config=NGRAM)
    config.speculative_config.method = method
    _check(config)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    if method == "ngram":
        return _check(config)
    with pytest.raises(ValueError, match="under Model Runner V2") as caught:
        _check(config)
    assert_sentence(str(caught.value))


def test_the_methods_named_are_those_that_vllm_takes(build: Build) -> None:
    """vLLM 0.33 has no Medusa; what is written here is what each version documents."""
    message = refusal(build, "LlamaForCausalLM", speculative_config=dict(NGRAM, method="ngram_gpu"))
    named = message.partition("to one of ")[2].partition(", remove")[0].split(", ")
    medusa = ["medusa"] if installed < (0, 33) else []
    assert named == ["ngram", *medusa, "suffix", "draft_model", "eagle", "eagle3", "mtp"]


def test_refuses_drafts_where_who_evicts_is_chosen_late(build: Build) -> None:
    config = build(speculative_config=NGRAM)
    _check(config)
    with pytest.raises(ValueError, match="--kv-eviction-when pressure with speculative") as caught:
        support.check(config, EvictionConfig(policy="snapkv", when="pressure"))
    assert_sentence(str(caught.value))


def _ec_connector() -> dict[str, Any]:
    from vllm.config import ECTransferConfig

    return {
        "ec_transfer_config": ECTransferConfig(
            ec_connector="ECExampleConnector", ec_role="ec_both", ec_buffer_device="cpu"
        )
    }


@pytest.mark.parametrize(
    ("options", "what", "advice"),
    [
        (
            dict(speculative_config=dict(NGRAM, method="ngram_gpu")),
            "this method of speculative decoding",
            "set the method of --speculative-config to one of ngram, ",
        ),
        (
            dict(speculative_config=dict(NGRAM, num_speculative_tokens_per_batch_size=[(1, 8, 2)])),
            "speculative decoding with drafts in varying number",
            "remove num_speculative_tokens_per_batch_size",
        ),
        (_ec_connector, "encoder-cache connectors", "remove --ec-transfer-config"),
        (
            dict(tensor_parallel_size=2, decode_context_parallel_size=2),
            "context parallelism",
            "set --decode-context-parallel-size",
        ),
        (dict(kv_cache_dtype="fp8_e5m2"), "this type of KV cache", "set --kv-cache-dtype"),
        (dict(kv_sharing_fast_prefill=True), "--kv-sharing-fast-prefill", "remove the flag"),
        (
            dict(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"]),
            "--kv-cache-dtype-skip-layers with an FP8 cache",
            "remove the flag",
        ),
        (dict(block_size=16), "this block size", "set --block-size to a multiple of 32"),
        (dict(prefix_match_unit=32), "hits inside a block", "remove --prefix-match-unit"),
        (dict(runner="pooling"), "pooling models", "without --kv-eviction"),
    ],
)
def test_refuses_feature(build: Build, options: Any, what: str, advice: str) -> None:
    message = refusal(build, **(options() if callable(options) else options))
    assert_sentence(message)
    assert what in message.split(", because ")[0] and advice in message.split("; ")[1]


def test_takes_a_block_size_that_vllm_will_choose(build: Build) -> None:
    """As vLLM 0.33's CPU build leaves it at 16 until the model is loaded."""
    vllm_config = build()
    cache = vllm_config.cache_config
    cache.block_size = 16
    assert not cache.user_specified_block_size
    assert not any(one.applies(vllm_config) for one in REFUSALS)
    cache.user_specified_block_size = True
    (refusal,) = (one for one in REFUSALS if one.applies(vllm_config))
    assert refusal.what == "this block size"


def test_refuses_sliding_window_without_hybrid_manager(build: Build) -> None:
    message = refusal(build, "Gemma3ForCausalLM", disable_hybrid_kv_cache_manager=True)
    assert_sentence(message)
    assert "without the hybrid KV cache manager" in message
    assert "remove --disable-hybrid-kv-cache-manager" in message
    build("LlamaForCausalLM", disable_hybrid_kv_cache_manager=True)


@pytest.mark.parametrize("layout", ["LBNHC", "NHD", "BLHNC"])
def test_refuses_layout(build: Build, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    message = refusal(build)
    assert_sentence(message)
    assert "unset VLLM_KV_CACHE_LAYOUT or set it to LBHNC" in message


@pytest.mark.skipif(installed >= (0, 33), reason="vLLM 0.33 has one Ray executor")
def test_refuses_the_older_ray_executor(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_config = build()
    vllm_config.parallel_config.distributed_executor_backend = "ray"
    assert not any(one.applies(vllm_config) for one in REFUSALS)
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    (refusal,) = (one for one in REFUSALS if one.applies(vllm_config))
    assert_sentence(refusal.sentence())
    assert "set VLLM_USE_RAY_V2_EXECUTOR_BACKEND to 1" in refusal.sentence()


def test_refuses_other_platforms(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    config = build()
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    with pytest.raises(
        ValueError, match="CPU, CUDA and ROCm builds only; use one of these"
    ) as caught:
        _check(config)
    assert_sentence(str(caught.value))


def test_rocm_is_served_but_for_fp8_caches(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    config, quantised = build(), build(kv_cache_dtype="fp8")
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: True)
    _check(quantised)
    monkeypatch.setattr(current_platform, "is_rocm", lambda: True)
    _check(config)
    with pytest.raises(ValueError, match="does not support this type of KV cache") as caught:
        _check(quantised)
    assert_sentence(str(caught.value))


@pytest.mark.parametrize("store_dtype", ["int4", "int8"])
def test_refuses_stores_in_few_bits_that_no_kernel_of_gpus_reads(
    build: Build, monkeypatch: pytest.MonkeyPatch, store_dtype: str
) -> None:
    from vllm.platforms import current_platform

    config, drafts = build(), build(speculative_config=NGRAM)
    stored = EvictionConfig(policy="snapkv", store_dtype=store_dtype)
    support.check(drafts, stored)
    quantised = build(kv_cache_dtype="fp8")
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: True)
    support.check(config, stored)
    monkeypatch.setattr(type(config.model_config), "get_head_size", lambda _: 64)
    with pytest.raises(ValueError, match="int4 and int8 with an FP8 cache on GPUs") as caught:
        support.check(quantised, stored)
    assert_sentence(str(caught.value))
    _check(drafts)
    with pytest.raises(ValueError, match="int4 and int8 with speculative decoding on") as caught:
        support.check(drafts, stored)
    assert_sentence(str(caught.value))
    xformers = dict(policy="snapkv", attention="xformers")
    support.check(config, EvictionConfig(**xformers))
    with pytest.raises(ValueError, match="with --kv-eviction-attention xformers") as caught:
        support.check(config, EvictionConfig(**xformers, store_dtype=store_dtype))
    assert_sentence(str(caught.value))


@pytest.mark.parametrize("policy", ["subgen-stream", "h2o", "ada-h2o"])
def test_refuses_extensions_of_attention_that_do_not_run_on_a_gpu(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    from vllm_kvevict.attention.extensions.base import AttentionExtension

    allowed = EvictionConfig(policy="snapkv", allow=policy)
    xformers = EvictionConfig(policy="snapkv", allow=policy, attention="xformers")
    for config in (allowed, xformers):
        support._check_policies(config)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    support._check_policies(allowed)
    with pytest.raises(ValueError, match=f"the policy {policy} with --kv-eviction-attention") as no:
        support._check_policies(xformers)
    assert_sentence(str(no.value))
    monkeypatch.setattr(support, "resolve_name", lambda name: AttentionExtension)
    with pytest.raises(ValueError, match=f"the policy {policy} on this platform") as caught:
        support._check_policies(allowed)
    assert_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        # vLLM builds these on other hardware, or for models too large to imitate.
        ("model_config.model_arch_config.rswa_window", 128, "reference sliding-window"),
        ("model_config.is_diffusion", True, "diffusion language models"),
        ("parallel_config.ubatch_size", 2, "micro-batching"),
        ("parallel_config.enable_dbo", True, "micro-batching"),
        ("model_config.is_mm_prefix_lm", True, "images in this model"),
        ("model_config.hf_text_config.is_causal", False, "bidirectional attention"),
        ("attention_config.use_non_causal", True, "bidirectional attention"),
        ("attention_config.hisparse_config", "HiSparse", "HiSparse"),
        ("parallel_config.enable_elastic_ep", True, "elastic expert parallelism"),
        ("parallel_config.enable_fault_tolerance", True, "engine recovery"),
        ("parallel_config.prefill_context_parallel_size", 2, "context parallelism"),
        ("cache_config.cache_dtype", "bfloat16", "this type of KV cache"),
        ("model_config.multimodal_config", "video", "--video-pruning-rate"),
        # vLLM takes it for mixtures of experts under Model Runner V2 alone.
        ("aux_output_config.enable_return_routed_experts", True, "--enable-return-routed-experts"),
    ],
)
def test_refuses_setting(build: Build, path: str, value: Any, what: str) -> None:
    config = build()
    *owners, name = path.split(".")
    owner = config
    for part in owners:
        owner = getattr(owner, part)
    if value == "HiSparse":
        from vllm.config.attention import HiSparseConfig

        value = HiSparseConfig()
    if value == "video":
        value = MultiModalConfig(video_pruning_rate=0.5)
    assert hasattr(owner, name) or name == "is_causal"
    object.__setattr__(owner, name, value)
    with pytest.raises(ValueError) as caught:
        _check(config)
    assert_sentence(str(caught.value))
    assert what in str(caught.value).split(", because ")[0]


def test_refuses_pyramids_where_layers_cannot_be_grouped(build: Build) -> None:
    config = build()
    _check(config, "pyramidkv")
    object.__setattr__(config.parallel_config, "pipeline_parallel_size", 2)
    _check(config)
    with pytest.raises(ValueError, match="fewer than two layers with full attention") as caught:
        _check(config, "ada-pyramid")
    assert_sentence(str(caught.value))
    with pytest.raises(ValueError, match="fewer than two layers with full attention") as caught:
        _check(build("Gemma3ForCausalLM"), "ada-pyramid")
    assert_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("Gemma3ForCausalLM", {}),
        ("LlamaForCausalLM", dict(tensor_parallel_size=2)),
        ("LlamaForCausalLM", dict(enable_lora=True, max_lora_rank=8)),
        ("LlamaForCausalLM", dict(block_size=32, enable_prefix_caching=False)),
        ("LlamaForCausalLM", dict(dtype="bfloat16", kv_cache_dtype="bfloat16")),
    ],
)
def test_accepts(build: Build, architecture: str, options: dict[str, Any]) -> None:
    config = build(architecture, **options)
    assert config.parallel_config.worker_cls == "vllm_kvevict.worker.cpu.EvictingCPUWorker"


def test_refuses_audits_where_some_layers_do_not_evict(build: Build) -> None:
    audited = dict(additional_config={"kv_eviction": dict(policy="ada-snapkv", audit="1%")})
    build("LlamaForCausalLM", **audited)
    for architecture in ("Gemma3ForCausalLM", "GptOssForCausalLM"):
        with pytest.raises(ValueError, match=r"--kv-eviction-audit .* layers that do not evict"):
            build(architecture, **audited)


def test_serves_latent_caches_on_their_backend_for_cpus(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = build("DeepseekV2ForCausalLM")
    assert config.cache_config.block_size == 16 and evictable_layers(config) == 2
    automatic = build("DeepseekV2ForCausalLM", additional_config={"kv_eviction": "auto"})
    assert automatic.additional_config["kv_eviction"]["policy"] == "snapkv"
    mine = identity(config)
    assert mine.kv_heads == 1
    shares = Profile(model=mine, policy="snapkv", budget="20%", layers=(0.4, 1.6)).model_dump()
    asked = {"kv_eviction": dict(policy="auto", profile=shares)}
    found = build("DeepseekV2ForCausalLM", additional_config=asked).additional_config
    assert (found["kv_eviction"]["policy"], found["kv_eviction"]["budget"]) == ("snapkv", "20%")
    build("DeepseekV2ForCausalLM", tensor_parallel_size=2)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    with pytest.raises(ValueError, match="on CPUs with AMX, because") as caught:
        _check(config)
    assert_sentence(str(caught.value))
    config.attention_config.backend = AttentionBackendEnum.CPU_MLA
    _check(config)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: True)
    with pytest.raises(ValueError, match="MLA models on GPUs"):
        _check(config)


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        *((name, True) for name in ("snapkv", "ada-snapkv", "tova", "streaming-llm", "pyramidkv")),
        *((name, True) for name in ("probe", "ada-probe")),
        *((name, False) for name in ("defensive", "ada-defensive", "h2o", "subgen-stream")),
        ("subgen", False),
    ],
)
def test_policies_of_latent_caches(build: Build, policy: str, served: bool) -> None:
    config = build("DeepseekV2ForCausalLM")
    if served:
        return _check(config, policy)
    with pytest.raises(ValueError, match=f"the policy {policy} for MLA models") as caught:
        _check(config, policy)
    assert_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("model_config.hf_text_config.index_topk", 32, "sparse MLA models"),
        ("model_config.hf_text_config.compress_ratios", [1], "sparse MLA models"),
        (
            "speculative_config",
            SimpleNamespace(method="ngram", uses_dynamic_speculative_decoding=lambda: False),
            "decoding of MLA models",
        ),
        ("cache_config.cache_dtype", "fp8", "FP8 caches of MLA models"),
        ("lora_config", SimpleNamespace(), "LoRA adapters of MLA models"),
        ("parallel_config.pipeline_parallel_size", 2, "MLA models with pipeline parallelism"),
    ],
)
def test_refuses_beside_latent_caches(build: Build, path: str, value: Any, what: str) -> None:
    config = build("DeepseekV2ForCausalLM")
    *owners, name = path.split(".")
    owner = config
    for part in owners:
        owner = getattr(owner, part)
    object.__setattr__(owner, name, value)
    with pytest.raises(ValueError, match=what) as caught:
        _check(config)
    assert_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        ("model_config", "is_hybrid", "MLA models with recurrent layers"),
        (None, "use_v2_model_runner", "under Model Runner V2"),
    ],
)
def test_refuses_what_vllm_derives_beside_latent_caches(
    build: Build, monkeypatch: pytest.MonkeyPatch, owner: str | None, name: str, what: str
) -> None:
    config = build("DeepseekV2ForCausalLM")
    monkeypatch.setattr(type(getattr(config, owner) if owner else config), name, True)
    with pytest.raises(ValueError, match=what) as caught:
        _check(config)
    assert_sentence(str(caught.value))


@pytest.mark.parametrize("asked", [dict(policy="probe"), dict(policy="snapkv", allow="ada-probe")])
def test_refuses_learned_scores_where_positions_are_not_known(
    build: Build, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str]
) -> None:
    config, asked_for = build(), EvictionConfig(profile="auto", **asked)
    monkeypatch.setattr(type(config.model_config), "uses_mrope", True)
    support.check(config, asked_for)
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    _check(config, "ada-defensive")
    with pytest.raises(ValueError, match="with M-RoPE under Model Runner V2") as caught:
        support.check(config, asked_for)
    assert_sentence(str(caught.value))


@pytest.mark.parametrize("layout", ["LBHNC", "HND"])
def test_accepts_head_major_layout(
    build: Build, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    build()


def test_an_fp8_cache_has_stores_of_fewer_bits(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And pages of ``int4`` are those of the cache, whichever of its names was given."""
    monkeypatch.setattr(type(build().model_config), "get_head_size", lambda _: 64)
    for cache_dtype, expected in (("fp8", "int4_fp8"), ("auto", "int4")):
        for given in ("int4", "int4_fp8"):
            settings = {"kv_eviction": {"policy": "snapkv", "store_dtype": given}}
            config = build(kv_cache_dtype=cache_dtype, additional_config=settings)
            assert config.additional_config["kv_eviction"]["store_dtype"] == expected
    settings = {"kv_eviction": {"policy": "snapkv", "store_dtype": "int8"}}
    message = refusal(build, kv_cache_dtype="fp8", additional_config=settings)
    assert_sentence(message)
    assert "int8 with an FP8 cache" in message and "to auto or int4" in message


@pytest.mark.parametrize("store_dtype", ["int4", "int8"])
def test_refuses_stores_in_few_bits_where_they_were_not_tried(
    build: Build, store_dtype: str
) -> None:
    few_bits = {"kv_eviction": {"policy": "snapkv", "store_dtype": store_dtype}}
    build(additional_config=few_bits)
    for options, reason in (
        (dict(kv_cache_dtype="fp8"), "for heads of less than 64 dimensions in 16 bits or FP8"),
        (dict(dtype="bfloat16"), "for heads of less than 64 dimensions in 16 bits or FP8"),
    ):
        message = refusal(build, additional_config=few_bits, **options)
        assert_sentence(message)
        assert f"--kv-eviction-store-dtype int4 and int8 {reason}" in message
    message = refusal(build, "DeepseekV2ForCausalLM", additional_config=few_bits)
    assert_sentence(message)
    assert "int4 and int8 for MLA models" in message


ROWS = REFUSALS + GROUP_REFUSALS + LATENT_REFUSALS + LEARNED_REFUSALS + PRESSURE_REFUSALS
ROWS += STORE_DTYPE_REFUSALS + INT8_REFUSALS
ROWS += (*GPU_STORE_REFUSALS, XFORMERS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_every_row_is_one_sentence(row: Any) -> None:
    assert_sentence(row.sentence())


def _check(config: Any, policy: str = "snapkv") -> None:
    support.check(config, EvictionConfig(policy=policy))

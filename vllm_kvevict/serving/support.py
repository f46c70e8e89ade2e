"""Refuses what eviction does not support, from the configuration, before the model loads.

The worker looks again at the real layers, for what no configuration tells.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, get_args

from vllm.config.speculative import SpeculativeMethod

from vllm_kvevict.compat import shim
from vllm_kvevict.config.memory_budget import evictable_stages
from vllm_kvevict.config.names import LEARNED
from vllm_kvevict.ops.fp8 import CACHE_DTYPES
from vllm_kvevict.serving.drafting import METHODS, check_drafting
from vllm_kvevict.serving.few_bits import check_gpu_stores, on_a_gpu, refused_on_gpus
from vllm_kvevict.serving.latent import LATENT_REFUSALS
from vllm_kvevict.serving.refusal import WITHOUT, Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig

DISTANCES = ("subgen",)
"""Policies that compare keys with each other."""

SERVED = tuple(
    method
    for method in ("ngram", "medusa", "suffix", *METHODS)
    if method in get_args(SpeculativeMethod)
)
"""Methods of speculative decoding that eviction works beside; vLLM 0.33 has no Medusa."""


def _platform(vllm_config: "VllmConfig") -> bool:
    from vllm.platforms import current_platform

    return not (current_platform.is_cpu() or current_platform.is_cuda_alike())


def _block_size(vllm_config: "VllmConfig") -> bool:
    from vllm.platforms import current_platform

    cache, latent = vllm_config.cache_config, vllm_config.model_config.use_mla
    if current_platform.is_cpu():
        # Left to vLLM 0.33's CPU build it is chosen once the model is loaded.
        given = cache.user_specified_block_size
        return given and cache.block_size % (16 if latent else 32) != 0
    return cache.block_size % 16 != 0


def _quantised(vllm_config: "VllmConfig") -> bool:
    from vllm.platforms import current_platform

    # What ROCm calls FP8 is another type on some of its GPUs.
    served = () if current_platform.is_rocm() else CACHE_DTYPES
    model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return vllm_config.cache_config.cache_dtype not in ("auto", model_dtype, *served)


def _layout(vllm_config: "VllmConfig") -> bool:
    from vllm import envs

    return envs.VLLM_KV_CACHE_LAYOUT not in (None, "LBHNC", "HND")


def _older_ray(vllm_config: "VllmConfig") -> bool:
    ray = vllm_config.parallel_config.distributed_executor_backend == "ray"
    return ray and shim().has_older_ray_executor()


def _promoted(vllm_config: "VllmConfig") -> bool:
    model = vllm_config.model_config
    return bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager) and (
        model.get_sliding_window() is not None or model.attention_chunk_size is not None
    )


def _narrow_values(vllm_config: "VllmConfig") -> bool:
    model = vllm_config.model_config
    size = getattr(model.hf_text_config, "v_head_dim", None)
    # Latent attention pads its values where it is served without its latent cache.
    return not model.is_deepseek_mla and size not in (None, model.get_head_size())


def _bidirectional(vllm_config: "VllmConfig") -> bool:
    model = vllm_config.model_config
    return (
        vllm_config.attention_config.use_non_causal
        or getattr(model.hf_text_config, "is_causal", True) is False
    )


REFUSALS = (
    Refusal(
        "this platform",
        "this release has attention backends for vLLM's CPU, CUDA and ROCm builds only",
        "use one of these builds or serve without --kv-eviction",
        _platform,
    ),
    # Models.
    Refusal(
        "pooling models",
        "they generate no tokens, so there is no cache to keep small",
        WITHOUT,
        lambda c: c.model_config.runner_type == "pooling",
    ),
    Refusal(
        "encoder-decoder models",
        "their cross-attention reads the encoder's cache as a whole",
        WITHOUT,
        lambda c: c.model_config.is_encoder_decoder,
    ),
    Refusal(
        "diffusion language models",
        "they rewrite tokens whose keys may already be evicted",
        WITHOUT,
        lambda c: c.diffusion_config is not None or c.model_config.is_diffusion,
    ),
    Refusal(
        "models without full-attention layers",
        "a model without attention has no KV cache",
        WITHOUT,
        lambda c: c.model_config.is_attention_free,
    ),
    Refusal(
        "models without full-attention layers",
        "every layer of this one has a sliding window, which bounds its cache already",
        WITHOUT,
        lambda c: c.cache_config.sliding_window is not None,
    ),
    Refusal(
        "values of another size than their keys",
        "vLLM keeps them in a cache with attention backends of its own, which read one table a "
        "request",
        WITHOUT,
        _narrow_values,
    ),
    Refusal(
        "reference sliding-window (R-SWA) models",
        "they drop generated tokens by a rule of their own",
        WITHOUT,
        lambda c: c.model_config.rswa_window is not None,
    ),
    Refusal(
        "images in this model",
        "its image tokens attend to what comes after them, and scores assume that a token sees "
        "only what comes before it",
        "serve its text alone with --language-model-only or --limit-mm-per-prompt '{\"image\": 0}' "
        "(and 0 for every other kind of input that the model takes)",
        lambda c: c.model_config.is_mm_prefix_lm,
    ),
    Refusal(
        "--video-pruning-rate",
        "the tokens of a video would get other positions while its prompt is computed, which has "
        "not been tried",
        "remove the flag",
        lambda c: (media := c.model_config.multimodal_config) and media.video_pruning_rate,
    ),
    Refusal(
        "bidirectional attention",
        "scores assume that a token sees only what comes before it",
        WITHOUT,
        _bidirectional,
    ),
    Refusal(
        "ALiBi",
        "its biases need every key at its own position",
        WITHOUT,
        lambda c: c.model_config.uses_alibi,
    ),
    # Features.
    Refusal(
        "this method of speculative decoding",
        "drafts must be known when a step is planned, and it has not been tried",
        f"set the method of --speculative-config to one of {', '.join(SERVED)}, remove the flag "
        "or serve without --kv-eviction",
        lambda c: c.speculative_config is not None and c.speculative_config.method not in SERVED,
    ),
    Refusal(
        "this method of speculative decoding under Model Runner V2",
        "vLLM has it for V1 alone",
        "set VLLM_USE_V2_MODEL_RUNNER to 0 or the method of --speculative-config to ngram",
        lambda c: (
            c.speculative_config is not None
            and c.speculative_config.method in ("medusa", "suffix")
            and c.use_v2_model_runner
        ),
    ),
    Refusal(
        "speculative decoding of models with recurrent layers",
        "it has not been tried with it",
        "remove --speculative-config or serve without --kv-eviction",
        lambda c: c.speculative_config is not None and c.model_config.is_hybrid,
    ),
    Refusal(
        "speculative decoding with pipeline parallelism",
        "it has not been tried with it",
        "remove --speculative-config or set --pipeline-parallel-size to 1",
        lambda c: c.speculative_config is not None and c.parallel_config.pipeline_parallel_size > 1,
    ),
    Refusal(
        "speculative decoding with drafts in varying number",
        "it has not been tried with it",
        "remove num_speculative_tokens_per_batch_size from --speculative-config",
        lambda c: (
            c.speculative_config is not None
            and c.speculative_config.uses_dynamic_speculative_decoding()
        ),
    ),
    Refusal(
        "encoder-cache connectors",
        "disaggregated encoders have not been tried with it",
        "remove --ec-transfer-config or serve without --kv-eviction",
        lambda c: c.ec_transfer_config is not None,
    ),
    Refusal(
        "context parallelism",
        "each rank holds only some of a head's tokens",
        "set --decode-context-parallel-size and --prefill-context-parallel-size to 1",
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1
            or c.parallel_config.prefill_context_parallel_size > 1
        ),
    ),
    Refusal(
        "this type of KV cache",
        "keys are scored in the type of the model or in FP8 with one scale a layer",
        "set --kv-cache-dtype to auto, to the type of the model, or, but on ROCm, to fp8",
        _quantised,
    ),
    Refusal(
        "--kv-cache-dtype-skip-layers with an FP8 cache",
        "layers that evict must have blocks of one size in bytes",
        "remove the flag",
        lambda c: (
            c.cache_config.kv_cache_dtype_skip_layers and c.cache_config.cache_dtype in CACHE_DTYPES
        ),
    ),
    Refusal(
        "--enable-return-routed-experts",
        "vLLM stores the experts of each block of tokens in as many places as its KV cache has "
        "blocks, and expects every request to start at a block that it stored",
        "remove it, also from --aux-output-config",
        lambda c: c.aux_output_config.enabled,
    ),
    Refusal(
        "--kv-sharing-fast-prefill",
        "it skips the prompt's queries, which decide what to keep",
        "remove the flag",
        lambda c: c.cache_config.kv_sharing_fast_prefill,
    ),
    Refusal(
        "micro-batching",
        "a step's requests would reach the attention backend in two halves",
        "remove --enable-dbo and --ubatch-size",
        lambda c: c.parallel_config.use_ubatching,
    ),
    Refusal(
        "HiSparse",
        "it brings its own block manager",
        "remove it from --attention-config",
        lambda c: c.attention_config.hisparse_config is not None,
    ),
    Refusal(
        "elastic expert parallelism and engine recovery",
        "a worker that restarts has lost which tokens its requests keep",
        "remove --enable-elastic-ep and --enable-fault-tolerance",
        lambda c: c.parallel_config.enable_elastic_ep or c.parallel_config.enable_fault_tolerance,
    ),
    Refusal(
        "vLLM's older Ray executor",
        "it calls the model runner past the worker, which evicts",
        "set VLLM_USE_RAY_V2_EXECUTOR_BACKEND to 1",
        _older_ray,
    ),
    # Geometry of the cache.
    Refusal(
        "this KV-cache layout",
        "a head's tokens of one block must be contiguous",
        "unset VLLM_KV_CACHE_LAYOUT or set it to LBHNC",
        _layout,
    ),
    Refusal(
        "this block size",
        "the CPU kernel takes multiples of 32 tokens and the CUDA kernels multiples of 16",
        "set --block-size to a multiple of 32",
        _block_size,
    ),
    Refusal(
        "prefix-cache hits inside a block",
        "it keeps and frees whole blocks",
        "remove --prefix-match-unit",
        lambda c: c.cache_config.prefix_match_unit not in (None, c.cache_config.block_size),
    ),
    Refusal(
        "sliding-window or chunked-attention layers without the hybrid KV cache manager",
        "they would share a block table with layers that evict",
        "remove --disable-hybrid-kv-cache-manager or serve without --kv-eviction",
        _promoted,
    ),
)


GROUP_REFUSALS = (
    Refusal(
        "budgets by layer (--kv-eviction-profile, pyramidkv, ada-pyramid) for this model",
        "it, or one of its pipeline stages, has fewer than two layers with full attention",
        "choose another policy or a smaller --pipeline-parallel-size",
        lambda c: min(evictable_stages(c)) < 2,
    ),
)

LEARNED_REFUSALS = (
    Refusal(
        "the policies probe and ada-probe with M-RoPE under Model Runner V2",
        "the positions of images are not known there",
        "set --kv-eviction to ada-defensive or VLLM_USE_V2_MODEL_RUNNER to 0",
        lambda c: c.model_config.uses_mrope and c.use_v2_model_runner,
    ),
)

STORE_DTYPE_REFUSALS = (
    Refusal(
        "--kv-eviction-store-dtype int4 and int8 for MLA models",
        "a latent cache has no keys and values of its own",
        "set --kv-eviction-store-dtype to auto",
        lambda c: c.model_config.use_mla,
    ),
    Refusal(
        "--kv-eviction-store-dtype int4 and int8 for heads of less than 64 dimensions in 16 bits "
        "or FP8",
        "their scales would take the room of the tokens",
        "set --kv-eviction-store-dtype to auto",
        lambda c: (
            c.model_config.get_head_size() < 64
            and (c.model_config.dtype.itemsize < 4 or c.cache_config.cache_dtype in CACHE_DTYPES)
        ),
    ),
)

INT8_REFUSALS = (
    Refusal(
        "--kv-eviction-store-dtype int8 with an FP8 cache",
        "both take eight bits",
        "set --kv-eviction-store-dtype to auto or int4",
        lambda c: c.cache_config.cache_dtype in CACHE_DTYPES,
    ),
)

PRESSURE_REFUSALS = (
    Refusal(
        "--kv-eviction-when pressure with speculative decoding",
        "who evicts is chosen when a step is scheduled, before its drafts are accepted",
        "remove --speculative-config or set --kv-eviction-when to always",
        lambda c: c.speculative_config is not None,
    ),
)


def check(vllm_config: "VllmConfig", config: "EvictionConfig") -> None:
    """Refuse what eviction does not work with.

    Args:
        vllm_config: As vLLM built it.
        config: The settings of eviction.

    Raises:
        ValueError: In one sentence: what is unsupported, why, and what to do.

    """
    latent = vllm_config.model_config.use_mla
    refusals = REFUSALS + (GROUP_REFUSALS if config.has_groups else ())
    refusals += LATENT_REFUSALS if latent else ()
    refusals += () if config.token_format.as_cached else STORE_DTYPE_REFUSALS
    refusals += tuple(refused_on_gpus(vllm_config, config)) if on_a_gpu() else ()
    refusals += INT8_REFUSALS if config.store_dtype == "int8" else ()
    refusals += LEARNED_REFUSALS if LEARNED.intersection(config.policies) else ()
    for refusal in refusals + (PRESSURE_REFUSALS if config.when == "pressure" else ()):
        if refusal.applies(vllm_config):
            raise ValueError(refusal.sentence())
    check_gpu_stores(config)
    _check_policies(config, latent)
    check_drafting(vllm_config, config)


def _check_policies(config: "EvictionConfig", latent: bool = False) -> None:
    """Refuse policies that do not load, or whose attention or kernels this platform lacks."""
    from vllm.platforms import current_platform

    from vllm_kvevict.ops.cuda.extension import is_built, obstacle
    from vllm_kvevict.policies.kernels import check_kernels
    from vllm_kvevict.policies.registry import build_policies

    # Also where nothing is refused: a policy of another package may not load.
    policies = build_policies(config).items()
    for name, policy in policies if latent else ():
        needs = policy.requirements
        floats = needs.floats_per_token and not needs.key_scores
        if needs.values or floats or name in DISTANCES:
            raise ValueError(
                f"KV eviction does not support the policy {name} for MLA models, because a latent "
                "cache has no keys and values of its own; choose snapkv, tova or streaming-llm."
            )
    if current_platform.is_cpu():
        return
    if config.kernels == "required" and current_platform.is_cuda() and not is_built():
        check_kernels(build_policies(config), str(obstacle()))
    for name, policy in policies:
        if not policy.requirements.attention:
            continue
        if not resolve_name(policy.requirements.attention).serves_gpus:
            raise ValueError(
                f"KV eviction does not support the policy {name} on this platform, because its "
                "extension of attention runs on CPUs only; choose another policy."
            )
        if config.attention == "xformers":
            raise ValueError(
                f"KV eviction does not support the policy {name} with --kv-eviction-attention "
                "xformers, because its requests run over tables of pages that this kernel does not "
                "make; set --kv-eviction-attention to auto."
            )

"""Refuses combinations with drafting layers (EAGLE, MTP, a draft model)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig

METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods of speculative decoding that draft with layers that have a KV cache."""


def _runner(c: "VllmConfig", config: "EvictionConfig") -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu() or c.use_v2_model_runner


def _beside(c: "VllmConfig", config: "EvictionConfig") -> bool:
    from vllm_kvevict.config.memory_budget import evictable_layers

    models = (c.model_config, c.speculative_config.draft_model_config)
    window = any(
        model.get_sliding_window() is not None or model.attention_chunk_size is not None
        for model in models
    )
    return window or evictable_layers(c) < c.model_config.get_total_num_hidden_layers()


def _shape(c: "VllmConfig", config: "EvictionConfig") -> bool:
    shapes = {
        (
            model.get_num_attention_heads(c.parallel_config),
            model.get_num_kv_heads(c.parallel_config),
            model.get_head_size(),
        )
        for model in (c.model_config, c.speculative_config.draft_model_config)
    }
    return len(shapes) > 1 or c.speculative_config.draft_model_config.use_mla


def _cache(c: "VllmConfig", config: "EvictionConfig") -> bool:
    dtypes = (c.cache_config.cache_dtype, c.speculative_config.kv_cache_dtype)
    return any(str(dtype).startswith("fp8") for dtype in dtypes)


def _way(c: "VllmConfig", config: "EvictionConfig") -> bool:
    draft = c.speculative_config
    return (
        draft.parallel_drafting
        or draft.use_gemma4_mtp()
        or draft.use_step3p5_mtp()
        or draft.use_multi_module_mtp()
    )


def _policies(c: "VllmConfig", config: "EvictionConfig") -> bool:
    from vllm_kvevict.policies.requirements import policy_requirements

    needs = policy_requirements(config).values()
    return any(one.attention for one in needs)


UNTRIED: tuple[tuple[str, Callable[["VllmConfig", "EvictionConfig"], Any]], ...] = (
    ("on GPUs or by model runner V2", _runner),
    ("with async scheduling", lambda c, _: c.scheduler_config.async_scheduling),
    (
        "with tensor, pipeline or data parallelism",
        lambda c, _: c.parallel_config.world_size_across_dp > 1,
    ),
    ("with --enable-lora", lambda c, _: c.lora_config is not None),
    ("with images", lambda c, _: c.model_config.is_multimodal_model),
    ("in models with layers that do not evict", _beside),
    ("with another number or size of heads than the model", _shape),
    ("with --kv-cache-dtype fp8", _cache),
    ("in parallel or by several modules", _way),
    (
        "with --kv-eviction-profile, pyramidkv or ada-pyramid",
        lambda _, e: e.has_groups or e.profile is not None,
    ),
    ("with h2o, ada-h2o or subgen-stream", _policies),
    ("with --kv-eviction-prefill-interval", lambda _, e: e.prefill_interval),
    ("with --kv-eviction-every", lambda _, e: e.every),
    ("with --kv-eviction-audit", lambda _, e: e.audits),
    ("with --kv-eviction-store-memory or --kv-eviction-store-path", lambda _, e: e.has_tiers),
    ("with --kv-eviction-store-dtype", lambda _, e: not e.token_format.as_cached),
)


def check_drafting(vllm_config: "VllmConfig", config: "EvictionConfig") -> None:
    """Refuse what layers that draft have not been tried with.

    Args:
        vllm_config: As vLLM built it.
        config: The settings of eviction.

    Raises:
        ValueError: In one sentence: what, and what to do.

    """
    draft = vllm_config.speculative_config
    if draft is None or draft.method not in METHODS:
        return
    for what, applies in UNTRIED:
        if applies(vllm_config, config):
            raise ValueError(
                f"KV eviction does not support layers that draft ({draft.method}) {what}, because "
                "they have not been tried so; set the method of --speculative-config to ngram or "
                "serve without --kv-eviction."
            )

"""The layers of a model and their KV-cache specs, from its configuration alone."""

from typing import TYPE_CHECKING, Any

from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

from vllm_kvevict.cache.spec import EvictableAttentionSpec
from vllm_kvevict.tools.plan.options import SizingError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.config.config import EvictionConfig

UNEVEN = ("block_configs", "global_head_dim", "num_global_key_value_heads")
"""Fields of configurations with layers that differ in heads or head size."""

KINDS = ("full_attention", "sliding_attention")


def rank_specs(
    vllm_config: "VllmConfig", config: "EvictionConfig | None"
) -> "list[dict[str, KVCacheSpec]]":
    """The specs of every pipeline stage's layers, as a tensor-parallel rank of it has them.

    Without ``config`` they are vLLM's own, which do not evict.

    Raises:
        SizingError: The configuration does not tell what the layers are like.

    """
    from vllm.distributed.utils import get_pp_indices

    stages = vllm_config.parallel_config.pipeline_parallel_size
    block_size = vllm_config.cache_config.block_size
    kinds = _kinds(vllm_config)
    parts = [slice(*get_pp_indices(len(kinds), stage, stages)) for stage in range(stages)]
    evictable = [kinds[part].count("full_attention") for part in parts]
    rules = iter(config.layer_rules(block_size, *evictable) if config is not None else ())
    specs: list[KVCacheSpec] = []
    for kind in kinds:
        spec = _spec(vllm_config, kind)
        evicts = config is not None and isinstance(spec, FullAttentionSpec)
        specs.append(EvictableAttentionSpec.from_spec(spec, next(rules)) if evicts else spec)
    named = [(f"layers.{index}", spec) for index, spec in enumerate(specs)]
    return [dict(named[part]) for part in parts]


def _kinds(vllm_config: "VllmConfig") -> list[str]:
    model = vllm_config.model_config
    text = model.hf_text_config
    for name in UNEVEN:
        if getattr(text, name, None):
            raise SizingError(
                f"the layers of this model differ ({name} in its configuration), which only a "
                "start-up can size: serve it and read the line 'KV eviction memory on this rank'"
            )
    layers = model.get_total_num_hidden_layers()
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        if model.get_sliding_window() is not None:
            raise SizingError("this configuration does not say which layers have a sliding window")
        return ["full_attention"] * layers
    for kind in kinds:
        if kind not in KINDS:
            raise SizingError(
                f"this model has layers of the kind {kind!r}; known: {', '.join(KINDS)}"
            )
    return list(kinds)


def _spec(vllm_config: "VllmConfig", kind: str) -> "FullAttentionSpec | SlidingWindowSpec":
    model = vllm_config.model_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    shape: dict[str, Any] = dict(
        block_size=vllm_config.cache_config.block_size,
        num_kv_heads=model.get_num_kv_heads(vllm_config.parallel_config),
        head_size=model.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(cache_dtype, model),
        kv_quant_mode=get_kv_quant_mode(cache_dtype),
    )
    if kind == "sliding_attention":
        return SlidingWindowSpec(**shape, sliding_window=model.get_sliding_window())
    if model.use_mla:
        return MLAAttentionSpec(**shape, max_tp_shards=1, cache_dtype_str=cache_dtype)
    return FullAttentionSpec(**shape)

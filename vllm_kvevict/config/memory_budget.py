"""How much memory eviction needs beside the KV cache. Engine and workers agree through it."""

from fractions import Fraction
from typing import TYPE_CHECKING

from vllm_kvevict.timeline.rule import blocks_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

    from vllm_kvevict.config.config import EvictionConfig

RING_BYTES = 512 * 2**20
"""Most bytes that the observation rings of one rank may take."""

FULL_ATTENTION = ("full_attention", "attention", "hybrid")
"""What configurations call a layer with full attention, perhaps beside a recurrent part."""


def evictable_stages(vllm_config: "VllmConfig") -> tuple[int, ...]:
    """Full-attention layers with a cache of their own on each pipeline stage, as configured.

    Workers see the layers themselves, and refuse to start where budgets differ by layer and the
    two counts do.
    """
    from vllm.distributed.utils import get_pp_indices

    text = vllm_config.model_config.hf_text_config
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    total = len(kinds) if kinds else vllm_config.model_config.get_total_num_hidden_layers()
    own = total - (getattr(text, "num_kv_shared_layers", None) or 0)
    evicts = [kind in FULL_ATTENTION for kind in kinds[:own]] if kinds else [True] * own
    stages = vllm_config.parallel_config.pipeline_parallel_size
    bounds = [get_pp_indices(total, stage, stages) for stage in range(stages)]
    return tuple(sum(evicts[start:end]) for start, end in bounds)


def evictable_layers(vllm_config: "VllmConfig") -> int:
    """Full-attention layers with a cache of their own in the whole model, as configured."""
    return sum(evictable_stages(vllm_config))


def drafting_layers(vllm_config: "VllmConfig") -> int:
    """Layers with a cache that only draft; a drafter is whole on every rank that has it."""
    draft = vllm_config.speculative_config
    if draft is None or not draft.uses_draft_kv_cache():
        return 0
    return draft.draft_model_config.get_total_num_hidden_layers()


def ring_bytes(vllm_config: "VllmConfig", config: "EvictionConfig") -> int:
    """Most bytes of one ring slot on one rank: [layers, window, query heads, head size]."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers = blocks_for(model.get_total_num_hidden_layers(), parallel.pipeline_parallel_size)
    layers = min(layers, evictable_layers(vllm_config)) + drafting_layers(vllm_config)
    heads = model.get_num_attention_heads(parallel)
    return layers * config.window * heads * model.get_head_size() * model.dtype.itemsize


def beside_page_values(available: int, specs: "Iterable[AttentionSpec]", channels: int) -> int:
    """What is left for the KV cache once page values stand beside it.

    Both grow with the number of blocks, so a fixed share of the memory goes to each. The share
    is exact where all layers have equal pages, else it is that of the layer that needs most.

    Args:
        available: Bytes for both.
        specs: Specs of the evictable layers on this rank, at least one.
        channels: float32 numbers for each cached token and KV head.

    Returns:
        Bytes, at most ``available``.

    """
    most = min(
        Fraction(
            spec.page_size_bytes,
            spec.page_size_bytes + spec.num_kv_heads * spec.block_size * channels * 4,
        )
        for spec in specs
    )
    return int(available * most)

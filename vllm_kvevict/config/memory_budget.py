"""Memory that eviction needs in addition to the KV cache, computed equally in engine and
workers."""

from fractions import Fraction
from typing import TYPE_CHECKING

from vllm_kvevict.ops.token_format import AS_CACHED, TokenFormat
from vllm_kvevict.rules.rule import blocks_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

    from vllm_kvevict.config.config import EvictionConfig

RING_BYTES = 512 * 2**20
"""Maximum bytes of the observation rings of one rank, unless ``ring_memory`` is set."""

FULL_ATTENTION = ("full_attention", "attention", "hybrid")
"""Names of layers with full attention in configurations, some with an additional recurrent part."""


def evictable_stages(vllm_config: "VllmConfig") -> tuple[int, ...]:
    """Return the number of full-attention layers with their own cache on each pipeline stage, as
    configured.

    Workers count the actual layers, and refuse to start if budgets differ by layer and the two
    counts differ.
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
    """Return the number of full-attention layers with their own cache in the whole model."""
    return sum(evictable_stages(vllm_config))


def drafting_layers(vllm_config: "VllmConfig") -> int:
    """Return the number of layers of the drafter with a cache. Every rank that has a drafter has
    all of it."""
    draft = vllm_config.speculative_config
    if draft is None or not draft.uses_draft_kv_cache():
        return 0
    return draft.draft_model_config.get_total_num_hidden_layers()


def ring_bytes(vllm_config: "VllmConfig", config: "EvictionConfig") -> int:
    """Return the maximum bytes of one ring slot on one rank: [layers, window, query heads, head
    size]."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers = blocks_for(model.get_total_num_hidden_layers(), parallel.pipeline_parallel_size)
    layers = min(layers, evictable_layers(vllm_config)) + drafting_layers(vllm_config)
    heads = model.get_num_attention_heads(parallel)
    return layers * config.window * heads * model.get_head_size() * model.dtype.itemsize


def kv_cache_bytes(
    available: int,
    specs: "Iterable[AttentionSpec]",
    channels: int,
    token_format: TokenFormat = AS_CACHED,
) -> int:
    """Return the memory for the KV cache if token statistics are stored in addition.

    Both grow with the number of blocks, so each gets a fixed share of the memory. The share is
    exact if all layers have pages of equal size; otherwise it is that of the layer that needs the
    most.

    Args:
        available: Bytes for both.
        specs: Specs of the evictable layers on this rank, at least one.
        channels: float32 statistics for each cached token and KV head.
        token_format: Format of stored tokens. The pages of statistics are as large as those of a
            store need them.

    Returns:
        Bytes, at most ``available``.

    """
    share = min(
        Fraction(
            spec.page_size_bytes,
            spec.page_size_bytes
            + spec.num_kv_heads * token_format.page_tokens(spec.block_size) * channels * 4,
        )
        for spec in specs
    )
    return int(available * share)

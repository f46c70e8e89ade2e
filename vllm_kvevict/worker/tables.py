"""Bytes of the tables that are allocated after vLLM has sized its KV cache."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.timeline.rule import EvictionRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.attention.scratch import Scratch
    from vllm_kvevict.cache.spec import EvictableAttentionSpec


def table_bytes(
    vllm_config: "VllmConfig",
    specs: "Mapping[str, EvictableAttentionSpec]",
    scratch: "Scratch",
    available: int,
) -> int:
    """Return the bytes of eviction state and decode buffers of one rank on CUDA.

    The number of blocks is bounded as if ``available`` were all KV cache.

    Args:
        vllm_config: vLLM's configuration: number of requests, lengths and prefix caching.
        specs: Evictable layers. Layers with equal eviction rules count as one group.
        scratch: The scratch buffers of the rank.
        available: Bytes for the KV cache and these tables.

    """
    meta = torch.device("meta")
    groups: dict[EvictionRule, list[str]] = {}
    for name, spec in specs.items():
        assert spec.timeline is not None
        groups.setdefault(spec.timeline, []).append(name)
    slots = 0
    if vllm_config.cache_config.enable_prefix_caching:
        # Groups share one block pool, so the largest block bounds the number of blocks.
        largest = max(
            sum(specs[name].page_size_bytes for name in names) for names in groups.values()
        )
        slots = available // largest
    total = 0
    for timeline, names in groups.items():
        state = GroupState(
            0,
            names,
            timeline,
            specs[names[0]].num_kv_heads,
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.model_config.max_model_len,
            meta,
            slots,
        )
        total += state.num_bytes + GroupBuffers(state, scratch, meta).num_bytes
    return total

"""Bytes of the tables that are allocated after vLLM has sized its KV cache."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.rules.rule import EvictionRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.attention.scratch import Scratch
    from vllm_kvevict.cache.spec import EvictableAttentionSpec

logger = init_logger("vllm.kv_eviction.worker")


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
        assert spec.rule is not None
        groups.setdefault(spec.rule, []).append(name)
    slots = 0
    if vllm_config.cache_config.enable_prefix_caching:
        # Groups share one block pool, so the largest block bounds the number of blocks.
        largest = max(
            sum(specs[name].page_size_bytes for name in names) for names in groups.values()
        )
        slots = available // largest
    total = 0
    for rule, names in groups.items():
        state = GroupState(
            0,
            names,
            rule,
            specs[names[0]].num_kv_heads,
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.model_config.max_model_len,
            meta,
            slots,
        )
        total += state.num_bytes + GroupBuffers(state, scratch, meta).num_bytes
    return total


def check_given_cache(
    given: int, tables: int, op_bytes: int, device: torch.device, overridden: bool
) -> None:
    """Log what eviction takes in addition to ``--kv-cache-memory-bytes``, and check that it fits.

    Call it after the run of the longest batch, with the peak of torch's memory reset before it.

    Args:
        given: Bytes of the flag: the KV cache, and the floats of cached tokens.
        tables: Bytes of the tables that are allocated after the cache.
        op_bytes: Bytes that kernels of attention allocate themselves.
        device: The CUDA device.
        overridden: True if ``--num-gpu-blocks-override`` sets the size of the cache, so that only
            the numbers are logged.

    Raises:
        ValueError: They do not fit, even without activations.

    """
    free, _ = torch.accelerator.get_memory_info(device)
    allocated = torch.accelerator.memory_allocated(device)
    # torch gives cached memory back to the driver before it fails.
    free += torch.accelerator.memory_reserved(device) - allocated
    extra = tables + op_bytes
    logger.info(
        "KV eviction: --kv-cache-memory-bytes (%d) is the size of the KV cache and of the floats "
        "of cached tokens, in addition to which eviction takes %d bytes for tables and %d bytes "
        "for attention kernels from the %d bytes that are free",
        given,
        tables,
        op_bytes,
        free,
    )
    if overridden:
        return
    if given + extra > free:
        raise ValueError(
            f"KV eviction: --kv-cache-memory-bytes {given} does not fit, because eviction needs "
            f"{extra} bytes in addition to the KV cache and {free} bytes are free: lower it to at "
            f"most {max(0, free - extra)}, or lower --max-num-seqs or --max-model-len, with which "
            "eviction's tables grow."
        )
    activations = torch.accelerator.max_memory_allocated(device) - allocated
    lacking = given + extra + activations - free
    if lacking > 0:
        logger.warning(
            "KV eviction: --kv-cache-memory-bytes (%d) and eviction's tables (%d bytes) leave %d "
            "bytes for activations, of which the longest batch needs %d; lower the flag by %d "
            "bytes if a step runs out of memory",
            given,
            extra,
            free - given - extra,
            activations,
            lacking,
        )

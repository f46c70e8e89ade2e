"""Where the memory of one rank goes: weights, KV cache, and the buffers of eviction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvevict.cache.rings import ObservationRings
from vllm_kvevict.cache.spec import EvictableAttentionSpec
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.compat import shim
from vllm_kvevict.config.memory_budget import kv_cache_bytes
from vllm_kvevict.engine.blocks import register_spec
from vllm_kvevict.ops.cuda.extension import is_built
from vllm_kvevict.ops.cuda.limits import HEAD_SIZES
from vllm_kvevict.ops.fp8 import CACHE_DTYPES
from vllm_kvevict.policies.requirements import floats_per_token, ring_slots
from vllm_kvevict.tools.plan.options import Options, SizingError
from vllm_kvevict.tools.plan.weights import assumed_activations, rank_weights
from vllm_kvevict.worker.tables import table_bytes
from vllm_kvevict.worker.workspace import eviction_sizes, workspace_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from vllm_kvevict.attention.scratch import Scratch
    from vllm_kvevict.config.config import EvictionConfig

LAYOUT = "LBHNC"


@dataclass(frozen=True)
class Buffers:
    """Bytes of eviction's own buffers on the rank that has most, and the slots of the rings.

    ``attention`` is what per-head attention works in on CUDA, ``workspace`` what eviction does;
    the CPU build needs none.
    """

    rings: int
    ring_slots: int
    tables: int
    token_stats: int
    attention: int
    workspace: int


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. ``weights`` and ``activations`` are None where they play no part.

    ``stock_kv_cache`` is the KV cache that the same server has without eviction: it also gets the
    memory of eviction's buffers.

    ``capacity_tokens`` and ``concurrency`` (sequences of the longest length) are what vLLM's
    start-up logs; they know nothing of eviction.
    """

    weights: int | None
    weights_from: str
    activations: int | None
    buffers: Buffers
    kv_cache: int
    stock_kv_cache: int
    kv_cache_config: "KVCacheConfig"
    capacity_tokens: int
    concurrency: float

    @property
    def blocks(self) -> int:
        return self.kv_cache_config.num_blocks

    @property
    def stock_blocks(self) -> int:
        """Blocks of the same server without eviction."""
        return self.stock_kv_cache // self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over the layers of a rank."""
        return self.kv_cache // self.blocks

    @property
    def specs(self) -> "list[KVCacheSpec]":
        return [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]


def share_out(
    options: Options,
    vllm_config: "VllmConfig",
    config: "EvictionConfig",
    ranks: "Sequence[dict[str, KVCacheSpec]]",
) -> RankMemory:
    """Size the KV cache as vLLM does at start-up, and the buffers as the worker does.

    Args:
        options: Memory of the device, or None where ``vllm_config`` gives the KV cache's.
        vllm_config: As the server would have it.
        config: The settings of eviction.
        ranks: Specs of the layers of every pipeline stage.

    Raises:
        SizingError: The memory does not suffice.

    """
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    register_spec()
    vllm_config.cache_config.kv_cache_layout = LAYOUT
    slots = ring_slots(vllm_config, config)
    rings = max(_rings(vllm_config, config, slots, specs) for specs in ranks)
    scratches = [_scratch(vllm_config, config, specs) for specs in ranks]
    attention = max(one.num_bytes + one.op_bytes if one else 0 for one in scratches)
    workspace = max(_workspace(vllm_config, config, specs) for specs in ranks)
    weights = activations = None
    weights_from = ""
    available = stock = vllm_config.cache_config.kv_cache_memory_bytes
    if options.gpu_memory is not None:
        weights, weights_from = rank_weights(options.weights, vllm_config)
        activations = options.activations
        if activations is None:
            activations = assumed_activations(vllm_config)
        share = int(options.gpu_memory * vllm_config.cache_config.gpu_memory_utilization)
        stock = share - weights - activations
        available = stock - rings - attention - workspace
        if available <= 0:
            raise SizingError(
                f"{share} bytes (--gpu-memory times --gpu-memory-utilization) leave no room for "
                f"a KV cache next to {weights} bytes of weights, {activations} of activations and "
                f"{rings + attention + workspace} of eviction's buffers"
            )
        available -= max(
            table_bytes(vllm_config, _by_name(specs), scratch, available) if scratch else 0
            for specs, scratch in zip(ranks, scratches, strict=True)
        )
    assert available is not None and stock is not None
    channels = floats_per_token(config)
    left = [
        kv_cache_bytes(available, evictable, channels, config.token_format)
        if evictable
        else available
        for evictable in (_evictable(specs) for specs in ranks)
    ]
    try:
        configs = shim().kv_cache_configs(vllm_config, list(ranks), left)
    except ValueError as error:
        raise SizingError(" ".join(str(error).split())) from None
    tables = max(_tables(vllm_config, one) for one in configs)
    values = max(_page_values(one, channels) for one in configs)
    kv_cache = max(max(t.size for t in one.kv_cache_tensors) for one in configs)
    return RankMemory(
        weights,
        weights_from,
        activations,
        Buffers(rings, slots, tables, values, attention, workspace),
        kv_cache,
        stock,
        configs[0],
        *get_kv_cache_capacity(vllm_config, configs[0]),
    )


def _by_name(specs: "dict[str, KVCacheSpec]") -> dict[str, EvictableAttentionSpec]:
    return {n: spec for n, spec in specs.items() if isinstance(spec, EvictableAttentionSpec)}


def _evictable(specs: "dict[str, KVCacheSpec]") -> list[EvictableAttentionSpec]:
    return list(_by_name(specs).values())


def _rings(
    vllm_config: "VllmConfig", config: "EvictionConfig", slots: int, specs: "dict[str, Any]"
) -> int:
    """Bytes of the worker's rings, which are never made: the meta device holds no memory."""
    if not slots:
        return 0
    model = vllm_config.model_config
    return ObservationRings(
        list(_by_name(specs)),
        slots,
        config.window,
        model.get_num_attention_heads(vllm_config.parallel_config),
        model.get_head_size(),
        model.dtype,
        torch.device("meta"),
    ).num_bytes


def _scratch(
    vllm_config: "VllmConfig", config: "EvictionConfig", specs: "dict[str, KVCacheSpec]"
) -> "Scratch | None":
    """Bytes of the buffers of per-head attention on a GPU; the CPU build has none."""
    from vllm.platforms import current_platform

    evictable = _evictable(specs)
    if not (current_platform.is_cuda_alike() and evictable):
        return None
    from vllm_kvevict.attention.choice import choose
    from vllm_kvevict.attention.scratch import Scratch, Shape

    kernel = choose(vllm_config, config)[0]
    spec, parallel = evictable[0], vllm_config.parallel_config
    shape = Shape(
        spec.num_kv_heads,
        vllm_config.model_config.get_num_attention_heads(parallel) // spec.num_kv_heads,
        spec.head_size,
        spec.block_size,
        vllm_config.scheduler_config.max_num_seqs,
        vllm_config.model_config.max_model_len,
        vllm_config.model_config.dtype.itemsize,
        vllm_config.cache_config.cache_dtype in CACHE_DTYPES,
    )
    return Scratch(kernel, shape, torch.device("meta"), config.token_format)


def _workspace(
    vllm_config: "VllmConfig", config: "EvictionConfig", specs: "dict[str, KVCacheSpec]"
) -> int:
    from vllm.platforms import current_platform

    evictable = _evictable(specs)
    if not (current_platform.is_cuda_alike() and evictable):
        return 0
    query_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    sizes = eviction_sizes(config, evictable[0], len(evictable), query_heads)
    kernels = current_platform.is_cuda() and is_built() and sizes.head_size in HEAD_SIZES
    return workspace_bytes(config, sizes, vllm_config.model_config.max_model_len, kernels)


def _tables(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    total = 0
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, EvictableAttentionSpec):
            assert spec.rule is not None
            total += GroupState(
                index,
                group.layer_names,
                spec.rule,
                spec.num_kv_heads,
                vllm_config.scheduler_config.max_num_seqs,
                vllm_config.model_config.max_model_len,
                torch.device("meta"),
                kv_cache_config.num_blocks if vllm_config.cache_config.enable_prefix_caching else 0,
            ).num_bytes
    return total


def _page_values(kv_cache_config: "KVCacheConfig", channels: int) -> int:
    """Bytes outside the cache, counted once for layers of different groups that share memory."""
    specs = {
        name: group.kv_cache_spec
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }
    places: dict[int, int] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            spec = specs[name]
            if not isinstance(spec, EvictableAttentionSpec):
                continue
            assert spec.rule is not None
            tokens = kv_cache_config.num_blocks * spec.num_kv_heads * spec.rule.page_tokens
            place = tensor.offset + index * tensor.layer_stride
            places[place] = max(places.get(place, 0), tokens * channels * torch.float32.itemsize)
    return sum(places.values())

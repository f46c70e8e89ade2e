"""A server without a model: vLLM's own configuration, KV-cache sizing and scheduler."""

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.simulate.card import Card
from benchmarks.simulate.model import Sizes, write_config
from benchmarks.simulate.setting import Setting

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

LAYOUT = "LBHNC"


@dataclass(frozen=True)
class Machine:
    """What all settings of a run share.

    Args:
        model: A built-in model or the path of a ``config.json``.
        card: Every rank's.
        max_model_len: Longest sequence in tokens; None for the model's own.
        ranks: Tensor-parallel size.
        block_size: Tokens in a block.
        max_num_seqs: Most running sequences.
        max_batched: Most tokens of a step.
        asynchronous: Whether the next step is scheduled before one was processed.
        caching: Prefix caching.
        blocks: Size of the pool in place of what memory allows; None for that.
        utilization: Share of the card's memory that vLLM takes.

    """

    model: str
    card: Card
    max_model_len: int | None
    ranks: int
    block_size: int
    max_num_seqs: int
    max_batched: int
    asynchronous: bool
    caching: bool
    blocks: int | None
    utilization: float


@dataclass(frozen=True)
class Server:
    """A scheduler, real, and what the clock must know of the model."""

    scheduler: Any
    sizes: Sizes
    blocks: int
    ring_slots: int

    @classmethod
    def start(cls, machine: Machine, setting: Setting) -> "Server":
        """Size the KV cache as a start-up would, and build vLLM's scheduler or ours over it."""
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from vllm_kvevict.engine.scheduler import EvictingAsyncScheduler, EvictingScheduler

        kinds: dict[tuple[bool, bool], Any] = {
            (False, False): Scheduler,
            (False, True): AsyncScheduler,
            (True, False): EvictingScheduler,
            (True, True): EvictingAsyncScheduler,
        }
        vllm_config = _vllm_config(machine, setting)
        with _ring_slots(vllm_config, setting):
            kv_cache_config, weights = _kv_cache(machine, setting, vllm_config)
            vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
            sizes = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            scheduler = kinds[setting.eviction is not None, machine.asynchronous](
                vllm_config,
                generate_scheduler_kv_cache_config([kv_cache_config]),
                StructuredOutputManager(vllm_config),
                block_size=sizes[0],
                hash_block_size=sizes[1],
                log_stats=False,
            )
        if setting.alone and setting.eviction is not None:
            scheduler._stores.enabled = False
        rings = scheduler._turns.slots if setting.eviction is not None else None
        return cls(
            scheduler,
            Sizes.of(vllm_config, weights),
            kv_cache_config.num_blocks,
            rings.count if rings is not None else 0,
        )


def _vllm_config(machine: Machine, setting: Setting) -> "VllmConfig":
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        write_config(machine.model, Path(folder))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=machine.max_model_len,
            block_size=machine.block_size,
            enable_prefix_caching=machine.caching,
            gpu_memory_utilization=machine.utilization,
            num_gpu_blocks_override=machine.blocks,
        ).create_engine_config()
    # The CPU platform has its own mind about these.
    config.scheduler_config.max_num_seqs = machine.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = machine.max_batched
    config.scheduler_config.max_num_scheduled_tokens = machine.max_batched
    config.scheduler_config.async_scheduling = machine.asynchronous
    config.scheduler_config.watermark = setting.watermark
    config.parallel_config.tensor_parallel_size = machine.ranks
    config.cache_config.kv_cache_layout = LAYOUT
    if setting.eviction is not None:
        config.additional_config = {"kv_eviction": setting.eviction}
    return config


def _ring_slots(vllm_config: "VllmConfig", setting: Setting) -> Any:
    if setting.rings is None or setting.eviction is None:
        return nullcontext()
    from vllm_kvevict.config.config import EvictionConfig
    from vllm_kvevict.policies import requirements

    config = EvictionConfig.parse(setting.eviction)
    assert config is not None
    bytes_of_one = requirements.ring_bytes(vllm_config, config)
    given = setting.rings * bytes_of_one
    return mock.patch.object(requirements, "parse_size", lambda _: given)


def _kv_cache(
    machine: Machine, setting: Setting, vllm_config: "VllmConfig"
) -> "tuple[KVCacheConfig, int]":
    """The KV cache and the bytes of the weights of one rank."""
    from vllm_kvevict.compat import shim
    from vllm_kvevict.config.config import EvictionConfig
    from vllm_kvevict.tools.plan.memory import share_out
    from vllm_kvevict.tools.plan.model import rank_specs
    from vllm_kvevict.tools.plan.options import Options
    from vllm_kvevict.tools.plan.weights import assumed_activations, rank_weights

    weights, activations = rank_weights(None, vllm_config)[0], assumed_activations(vllm_config)
    eviction = EvictionConfig.parse(setting.eviction)
    if eviction is not None:
        options = Options(machine.card.memory, 1, 1, weights, activations, json=False)
        specs = rank_specs(vllm_config, eviction)
        return share_out(options, vllm_config, eviction, specs).kv_cache_config, weights
    available = int(machine.card.memory * machine.utilization) - weights - activations
    specs = rank_specs(vllm_config, None)
    configs: list[KVCacheConfig] = shim().kv_cache_configs(vllm_config, specs, [available])
    return configs[0], weights

"""vLLM's schedulers as a server's settings make them, without a model or a worker."""

import copy
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any
from unittest import mock

import torch
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.math_utils import round_up
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.tiny_model import cached_tiny_llama
from vllm_kvevict.cache.spec import EvictableAttentionSpec
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.connectors import MULTI, NIXL
from vllm_kvevict.config.names import PYRAMIDS
from vllm_kvevict.config.profile import ModelIdentity, Profile
from vllm_kvevict.engine.blocks import register_spec
from vllm_kvevict.engine.scheduler import EvictingAsyncScheduler, EvictingScheduler
from vllm_kvevict.serving.offload import CONNECTOR, OURS
from vllm_kvevict.worker.cpu_offload import MainMemorySpec

STOP_TOKEN = 1
VOCABULARY = 1000


@dataclass(frozen=True)
class Setup:
    """A server's configuration, as far as the scheduler sees it.

    ``rings`` is the number of ring slots, None for one a sequence; ``second_budget`` adds a
    second evictable group and ``sliding_window`` a group that does not evict, of chunks of so many
    tokens where it is ``chunked``; ``full`` adds one with full attention. If ``pyramid`` is
    above 0, the policy is pyramidkv with so many groups of one layer; otherwise it is snapkv. With
    ``shares``, which fall, the policy is snapkv all the same, and these are its layers'.
    ``memory`` is for stores outside the KV cache, and ``disk`` the share of the operations on their
    files that fail, None for no files; ``offload`` is the number of chunks, of ``chunk`` blocks,
    that vLLM's own offload has, which stores ``answers``, too. ``connector`` is one that loads
    whole prompts; ``load_failure`` is vLLM's policy if it cannot. With ``events``, KV-cache events
    are made, which describe the offload's chunks. ``store_dtype`` is the type of stored tokens,
    and ``cap`` the maximum budget of a request.
    """

    budget: int | str = 40
    window: int = 8
    interval: int = 16
    needs_window: bool = True
    second_budget: int | None = None
    pyramid: int = 0
    beta: float = 20.0
    shares: tuple[float, ...] = ()
    sliding_window: int | None = None
    chunked: bool = False
    full: bool = False
    blocks: int = 64
    block_size: int = 8
    max_num_seqs: int = 8
    max_batched: int = 64
    long_prefill: int = 0
    caching: bool = True
    asynchronous: bool = False
    priority: bool = False
    rings: int | None = None
    reserve_full: bool = True
    watermark: float = 0.0
    shared: str = "keep"
    when: str = "always"
    marks: tuple[float, float] = (0.05, 0.1)
    prefill_interval: int = 0
    every: int = 0
    longest: int | None = None
    memory: int = 0
    disk: float | None = None
    audit: float = 0.0
    offload: int = 0
    chunk: int = 1
    answers: bool = False
    connector: str = ""
    load_failure: str = "recompute"
    events: bool = False
    store_dtype: str = "auto"
    cap: int | None = field(default=None, repr=False)

    @property
    def page(self) -> int:
        """Tokens in a page of a store."""
        return self.block_size * dict(auto=16, int8=30, int4=60)[self.store_dtype] // 16

    @property
    def offloads(self) -> int:
        """Chunks of vLLM's offload, where all layers evict."""
        return self.offload if self.caching and not self.others else 0

    @property
    def audits(self) -> float:
        """Share of the requests that are audited, where the server shares blocks."""
        return self.audit if self.caching and not self.others else 0.0

    @property
    def keeps(self) -> int:
        """Bytes of host memory for stores, where the server shares any.

        One byte, which holds no store, where there are only files.
        """
        shares = self.caching and not self.full
        return (self.memory or int(self.disk is not None)) if shares else 0

    @property
    def groups(self) -> int:
        evicting = self.pyramid or 1 + (self.second_budget is not None)
        return evicting + self.others

    @property
    def others(self) -> int:
        """Groups that do not evict, the one with a window last."""
        return self.full + (self.sliding_window is not None)

    def first_read(self, position: int) -> int:
        """The first position that a token of the group with a window reads."""
        assert self.sliding_window is not None
        if self.chunked:
            return position // self.sliding_window * self.sliding_window
        return max(0, position - self.sliding_window + 1)

    @property
    def policy(self) -> str:
        return "pyramidkv" if self.pyramid and not self.shares else "snapkv"

    def grouped(self, policy: str) -> bool:
        """Whether groups have budgets of their own under a policy."""
        if self.shares:
            return policy in ("snapkv", "h2o")  # Of those that a request may choose.
        return policy == "pyramidkv"

    def fractions(self, beside: int, most: int) -> list[Fraction]:
        """Shares of the groups where the mean is ``beside`` of ``most`` tokens."""
        if self.shares:
            return [Fraction(share) for share in self.shares]
        high = min(2 * beside - Fraction(beside) / Fraction(self.beta), Fraction(most))
        step = 2 * (high - beside) / (self.pyramid - 1)
        return [(high - group * step) / beside for group in range(self.pyramid)]

    @property
    def max_model_len(self) -> int:
        """What vLLM's own check at start-up would admit: one sequence fits the pool.

        Where prompts evict as they stream in, ``longest`` may be more.
        """
        if self.longest is not None:
            return self.longest
        return (self.blocks - 1) // self.groups * self.block_size

    @property
    def ring_count(self) -> int:
        if not self.needs_window:
            return 0
        return self.max_num_seqs if self.rings is None else self.rings


@cache
def base_config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    init_none_hash(sha256)
    register_spec()
    config = EngineArgs(
        model=str(cached_tiny_llama(kv_heads=2)),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=32,
    ).create_engine_config()
    return config, StructuredOutputManager(config)


def vllm_config(setup: Setup) -> Any:
    config = copy.copy(base_config()[0])
    config.additional_config = {"kv_eviction": eviction_config(setup).model_dump(mode="json")}
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = setup.max_model_len
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = setup.block_size
    config.cache_config.kv_cache_layout = "LBHNC"
    config.cache_config.num_gpu_blocks = setup.blocks
    config.cache_config.enable_prefix_caching = setup.caching
    config.scheduler_config = copy.copy(config.scheduler_config)
    scheduler = config.scheduler_config
    scheduler.max_num_seqs = setup.max_num_seqs
    scheduler.max_num_batched_tokens = setup.max_batched
    scheduler.long_prefill_token_threshold = setup.long_prefill
    scheduler.policy = "priority" if setup.priority else "fcfs"
    scheduler.scheduler_reserve_full_isl = setup.reserve_full
    scheduler.watermark = setup.watermark
    # The CPU platform turns it off whatever is asked.
    scheduler.async_scheduling = setup.asynchronous
    if setup.events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    if setup.offloads:
        specs = [group.kv_cache_spec for group in kv_cache_config(setup).kv_cache_groups]
        size = sum(spec.page_size_bytes for spec in specs) * setup.chunk
        extra = dict(
            cpu_bytes_to_use=setup.offloads * round_up(size, MainMemorySpec.BLOCK_SIZE_ALIGNMENT),
            blocks_per_chunk=setup.chunk,
            offload_prompt_only=not setup.answers,
            self_describing_kv_events=setup.events,
            **OURS,
        )
        offload = dict(kv_connector=CONNECTOR, kv_role="kv_both", kv_connector_extra_config=extra)
    if setup.connector:
        loads: dict[str, Any] = dict(
            kv_connector=setup.connector,
            kv_role="kv_consumer" if setup.connector in NIXL else "kv_both",
        )
        if setup.offloads:
            both = dict(connectors=[loads, offload])
            loads = dict(kv_connector=MULTI, kv_role="kv_both", kv_connector_extra_config=both)
        config.kv_transfer_config = KVTransferConfig(
            **loads, kv_load_failure_policy=setup.load_failure
        )
    elif setup.offloads:
        config.kv_transfer_config = KVTransferConfig(**offload)
    return config


MEASURED_AT = 0.25
"""Part of the tokens at which the shares of a setup were measured."""


def layer_shares(shares: tuple[float, ...]) -> Profile:
    model = ModelIdentity(architecture="any", layers=len(shares), kv_heads=2, config="any")
    return Profile(model=model, policy="snapkv", budget=f"{MEASURED_AT:.0%}", layers=shares)


def eviction_config(setup: Setup) -> EvictionConfig:
    low, high = setup.marks
    options = dict(groups=max(2, setup.pyramid), low_mark=low, high_mark=high)
    return EvictionConfig(
        policy=setup.policy,
        budget=setup.budget,
        window=setup.window,
        interval=setup.interval,
        prefill_interval=setup.prefill_interval,
        every=setup.every,
        profile=layer_shares(setup.shares) if setup.shares else None,
        shared_blocks=setup.shared,
        when=setup.when,
        allow="snapkv,streaming-llm,h2o" + ("" if setup.cap else ",none"),
        max_budget=setup.cap,
        store_memory=setup.keeps,
        audit=setup.audits,
        store_dtype=setup.store_dtype,
        options=options | (dict(beta=setup.beta) if setup.policy in PYRAMIDS else {}),
    )


def kv_cache_config(setup: Setup, evictable: bool = True) -> KVCacheConfig:
    shape: dict[str, Any] = dict(
        block_size=setup.block_size, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    specs: list[Any] = [FullAttentionSpec(**shape)]
    if evictable:
        config = eviction_config(setup)
        rules = config.layer_rules(setup.block_size, setup.pyramid or 1)
        if setup.second_budget is not None:
            second = config.model_copy(update={"budget": setup.second_budget})
            rules += second.layer_rules(setup.block_size, 1)
        specs = [EvictableAttentionSpec.from_spec(FullAttentionSpec(**shape), t) for t in rules]
    if setup.full:
        specs.append(FullAttentionSpec(**shape))
    if setup.sliding_window is not None and setup.chunked:
        specs.append(ChunkedLocalAttentionSpec(**shape, attention_chunk_size=setup.sliding_window))
    elif setup.sliding_window is not None:
        specs.append(SlidingWindowSpec(**shape, sliding_window=setup.sliding_window))
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(setup.blocks, [], groups)


def make_scheduler(setup: Setup, log_stats: bool = False) -> Any:
    """An EvictingScheduler or EvictingAsyncScheduler for this setup."""
    kind: Any = EvictingAsyncScheduler if setup.asynchronous else EvictingScheduler
    # The model behind the configuration has layers of another number than the setup's groups.
    layers = mock.patch(
        "vllm_kvevict.config.budget_log.evictable_stages", lambda *_: (setup.pyramid or 1,)
    )
    slots = mock.patch("vllm_kvevict.engine.scheduler.ring_slots", lambda *_: setup.ring_count)
    with slots, layers:
        return kind(
            vllm_config(setup),
            kv_cache_config(setup),
            base_config()[1],
            block_size=setup.block_size,
            hash_block_size=setup.block_size,
            log_stats=log_stats or setup.audits > 0,
        )


def make_request(
    setup: Setup,
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    asked: dict[str, Any] | None = None,
    **options: Any,
) -> Request:
    """A request; ``asked`` are its own settings, as ``vllm_xargs`` would bring them."""
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, stop_token_ids=[STOP_TOKEN], extra_args=asked),
        None,
        block_hasher=get_request_block_hasher(setup.block_size, sha256),
        **options,
    )

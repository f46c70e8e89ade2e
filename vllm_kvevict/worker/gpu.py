"""vLLM's CUDA worker with eviction."""

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_kvevict.attention.binding import GroupBinding
from vllm_kvevict.attention.choice import FLAG, choose
from vllm_kvevict.attention.gpu_buffers import GroupBuffers
from vllm_kvevict.attention.gpu_step import EvictingBuilderMixin
from vllm_kvevict.attention.kernels import optional_kernel
from vllm_kvevict.attention.scratch import Kernel, Scratch, Shape
from vllm_kvevict.attention.warm_up import warm_up
from vllm_kvevict.cache.layer_cache import LayerCache
from vllm_kvevict.cache.page_layout import PageLayout
from vllm_kvevict.cache.state import GroupState
from vllm_kvevict.cache.token_stats import TokenStats
from vllm_kvevict.ops.cuda import extension
from vllm_kvevict.ops.cuda.limits import HEAD_SIZES
from vllm_kvevict.ops.fp8 import CACHE_DTYPES
from vllm_kvevict.policies.kernels import check_kernels
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.policies.requirements import policy_requirements
from vllm_kvevict.worker.centres import key_centres, warn_of_lost_keys
from vllm_kvevict.worker.eviction import WorkerEviction
from vllm_kvevict.worker.fused import FusedEvictions, obstacle
from vllm_kvevict.worker.mixin import EvictionWorkerMixin, sinks_of
from vllm_kvevict.worker.probes import Probes
from vllm_kvevict.worker.tables import check_given_cache, table_bytes
from vllm_kvevict.worker.workspace import (
    EvictionSizes,
    Workspace,
    eviction_sizes,
    pytorch_bytes,
    workspace_bytes,
)

logger = init_logger("vllm.kv_eviction.worker")

BACKENDS = {
    "FLASH_ATTN": "vllm_kvevict.attention.flash.EvictingFlashBackend",
    "TRITON_ATTN": "vllm_kvevict.attention.triton.EvictingTritonBackend",
}


class EvictingWorker(EvictionWorkerMixin):
    """The worker of one CUDA rank."""

    _scratch: Scratch | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        needs = policy_requirements(self.eviction_config).values()
        EvictingBuilderMixin.extends = any(one.attention for one in needs)

    def _register_backend(self) -> None:
        _, name = choose(self.vllm_config, self.eviction_config)
        register_backend(AttentionBackendEnum[name], BACKENDS[name])
        # An engine without eviction may have run in this process and chosen vLLM's backend.
        selector._cached_get_attn_backend.cache_clear()

    def _kernel(self) -> Kernel:
        return choose(self.vllm_config, self.eviction_config)[0]

    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache, with the buffers of eviction already allocated.

        The tables that are allocated after the cache, and memory that kernels of attention allocate
        themselves, stay free. ``--kv-cache-memory-bytes`` is the size of the cache alone, as in
        vLLM, so these bytes are taken in addition to it, and are checked against the free memory.

        Raises:
            ValueError: The cache of ``--kv-cache-memory-bytes`` and the tables do not fit.

        """
        self._allocate_scratch()
        self._allocate_workspace()
        # The call below may set it to a value that an earlier start measured.
        given = self.cache_config.kv_cache_memory_bytes
        if given:
            # The peak is then that of the run with which vLLM compiles the model.
            torch.accelerator.reset_peak_memory_stats(self.device)
        available = super().determine_available_memory()
        scratch = self._allocate_scratch()
        specs = dict(zip(self._evictable_layers, self._evictable_specs, strict=True))
        tables = table_bytes(self.vllm_config, specs, scratch, available)
        if not given:
            return available - tables - scratch.op_bytes
        # Then the cache has another size than the flag says.
        overridden = self.cache_config.num_gpu_blocks_override is not None
        check_given_cache(given, tables, scratch.op_bytes, self.device, overridden)
        return available

    def _allocate_workspace(self) -> Workspace:
        """Allocate the memory in which evictions run, before vLLM measures what is left."""
        if self._workspace is None:
            self._workspace = Workspace(self._workspace_bytes(), self.device)
        return self._workspace

    def _workspace_bytes(self) -> int:
        impls = [self._layer(name).impl for name in self._evictable_layers]
        serves = all(impl.head_size in HEAD_SIZES and sinks_of(impl) is None for impl in impls)
        return workspace_bytes(
            self.eviction_config,
            self._eviction_sizes(),
            self.model_config.max_model_len,
            kernels=serves and extension.obstacle() is None,
        )

    def _eviction_sizes(self) -> EvictionSizes:
        impl, spec = self._layer(self._evictable_layers[0]).impl, self._evictable_specs[0]
        return eviction_sizes(
            self.eviction_config,
            spec,
            layers=len(self._evictable_layers),
            query_heads=impl.num_heads // impl.num_kv_heads * spec.num_kv_heads,
        )

    def _fused(
        self,
        states: dict[int, GroupState],
        caches: dict[str, LayerCache],
        token_stats: TokenStats | None,
        probes: Probes | None,
    ) -> FusedEvictions | None:
        if self._rings is None and probes is None:
            return None
        policies = build_policies(self.eviction_config)
        problem = extension.obstacle()
        required = self.eviction_config.kernels == "required" and current_platform.is_cuda()
        if problem is not None and required:
            check_kernels(policies, problem)
        problem = problem or obstacle(states, caches, self._rings)
        if problem is not None:
            # One line per machine, not per rank.
            logger.warning_once(
                "KV eviction runs its PyTorch operations, which are slower, because %s", problem
            )
            return None
        longest, workspace = self.model_config.max_model_len, self._allocate_workspace()
        served = policies, states, caches, self._rings, token_stats
        with self._like_the_runtime():
            fused = FusedEvictions(*served, longest, probes, workspace.num_bytes)
        taken = list(filter(fused.takes, policies))
        logger.info(
            "KV eviction runs CUDA kernels for %s", ", ".join(taken) or "none of the policies"
        )
        if len(taken) < len(policies):
            # Layers may differ in what was not known when the workspace was allocated.
            sizes = self._eviction_sizes()
            workspace.extend(pytorch_bytes(self.eviction_config, sizes, longest))
        return fused

    def _allocate_scratch(self) -> Scratch:
        if self._scratch is None:
            impls = [self._layer(name).impl for name in self._evictable_layers]
            shapes = {
                (impl.num_kv_heads, impl.num_heads // impl.num_kv_heads, impl.head_size)
                for impl in impls
            }
            sizes = {spec.block_size for spec in self._evictable_specs}
            if len(shapes) > 1 or len(sizes) > 1:
                raise ValueError(
                    "KV eviction on CUDA needs the same KV heads, query heads, head size and block "
                    f"size in every full-attention layer, and this model has {sorted(shapes)} with "
                    f"blocks of {sorted(sizes)} tokens: serve it without --kv-eviction."
                )
            if (optional := optional_kernel(self._kernel())) is not None:
                caps = any(impl.logits_soft_cap for impl in impls)
                sinks = any(sinks_of(impl) is not None for impl in impls)
                if problem := optional.layer_problem(caps, sinks):
                    raise ValueError(
                        f"KV eviction: {FLAG} {self._kernel()} does not work here, because "
                        f"{problem}."
                    )
            shape = Shape(
                *shapes.pop(),
                block_size=sizes.pop(),
                max_requests=self.scheduler_config.max_num_seqs,
                max_model_len=self.model_config.max_model_len,
                itemsize=self.model_config.dtype.itemsize,
                fp8=self.cache_config.cache_dtype in CACHE_DTYPES,
            )
            stored = self.eviction_config.token_format
            # Made here, because the workspace and the memory of the cache do not outlive sleep.
            stored.rotation(shape.head_size, self.device)
            with self._like_the_cache():
                self._scratch = Scratch(self._kernel(), shape, self.device, stored)
        return self._scratch

    def _reset(self) -> None:
        super()._reset()
        assert self._scratch is not None
        self._scratch.reset()
        for buffers in self._buffers:
            buffers.reset()

    def _bind(self, worker: WorkerEviction) -> None:
        super()._bind(worker)
        evictable = {name: self._layer(name) for name in self._evictable_layers}
        warn_of_lost_keys(self.model_runner.get_model(), evictable, worker.cache)
        scratch = self._allocate_scratch()
        self._buffers = []
        for group_id, state in worker.states.items():
            with self._like_the_cache():
                buffers = GroupBuffers(state, scratch, self.device)
            self._buffers.append(buffers)
            for attn_group in self.model_runner.attn_groups[group_id]:
                for builder in attn_group.metadata_builders:
                    builder.buffers = buffers
        logger.info(
            "KV eviction attention on this rank: %s kernel, %d bytes of scratch, %d bytes of "
            "lengths and slices, %d bytes of workspace for evictions",
            scratch.kernel,
            scratch.num_bytes + scratch.op_bytes,
            sum(buffers.num_bytes for buffers in self._buffers),
            self._allocate_workspace().num_bytes,
        )

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up eviction and then vLLM, which starts to watch for compilation at its end."""
        assert self.kv_eviction is not None
        self._allocate_workspace().open()
        for buffers in self._buffers:
            state = buffers.state
            layers = [self._layer(name) for name in state.layer_names]
            # Optional kernels compile for each batch, so a warm-up would not help.
            if buffers.scratch.optional is None:
                binding = GroupBinding(self.kv_eviction, state)
                warm_up(layers, binding, buffers, self.model_config.dtype)
        self.kv_eviction.warm_up()
        times = super().compile_or_warm_up_model()
        with self._allocate_workspace().use():
            # vLLM may have switched to another stream, and the memory follows before it serves.
            return times

    def _layer_cache(self, layer: Any, spec: AttentionSpec) -> LayerCache:
        cache: torch.Tensor = layer.kv_cache
        if not cache.is_contiguous():
            raise ValueError(
                "KV eviction needs contiguous head pages, but vLLM pads this model's KV cache "
                "because its layers have page sizes that do not divide one another; serve this "
                "model without --kv-eviction."
            )
        size = spec.block_size * (spec.head_size + spec.head_size_v)
        stored = self.eviction_config.token_format
        return LayerCache(
            pages=cache.view(-1, size),
            layout=interleaved(spec.block_size, spec.head_size),
            scale=layer.impl.scale,
            softcap=layer.impl.logits_soft_cap,
            query_scale=layer._q_scale_float if layer.query_quant is not None else 1.0,
            key_scale=layer._k_scale_float,
            value_scale=layer._v_scale_float,
            sinks=sinks_of(layer.impl),
            token_format=stored,
            centres=key_centres(self.model_runner.get_model(), layer, stored),
        )


def interleaved(block_size: int, head_size: int) -> PageLayout:
    """Return the page layout of vLLM's GPU kernels: each token's key, then its value."""
    tokens = torch.arange(block_size)[:, None] * 2 * head_size
    keys = tokens + torch.arange(head_size)
    return PageLayout(keys, keys + head_size)

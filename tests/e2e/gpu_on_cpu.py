"""The CUDA worker and its backends on a CPU: all but the FlashAttention kernel and the graphs.

Triton kernels run in the interpreter. FlashAttention's kernel and vLLM's two cache writers, which
ask for a CUDA device, are replaced by plain PyTorch that follows their documentation. Decode
steps are padded, captured and replayed (``replayed.py``): what a replay needs must therefore be
refreshed in place.
"""

import os
from typing import Any

import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.e2e.paged import flash_attn_varlen_func, reshape_and_cache_flash
from tests.e2e.replayed import Layer, Steps
from tests.efficient import efficient_attention_forward
from vllm_kvevict.attention.gpu_step import EvictingBuilderMixin
from vllm_kvevict.worker.gpu import BACKENDS, EvictingWorker

FREE = 2**36
"""Bytes that the device has free."""

STOCK, KERNEL = "KVEVICT_TEST_STOCK", "KVEVICT_TEST_KERNEL"


class Worker(EvictingWorker, CPUWorker):
    """The MRO is the CUDA worker's, with vLLM's CPU worker in the place of its CUDA worker."""

    def determine_available_memory(self) -> int:
        device = torch.accelerator
        device.reset_peak_memory_stats = lambda _: None
        device.get_memory_info = lambda _: (FREE, FREE)
        device.memory_allocated = device.memory_reserved = lambda _: 0
        device.max_memory_allocated = lambda _: 0
        return super().determine_available_memory()

    def _register_backend(self) -> None:
        flash_attn.flash_attn_varlen_func = flash_attn_varlen_func
        flash_attn.reshape_and_cache_flash = reshape_and_cache_flash
        triton_attn.triton_reshape_and_cache_flash = reshape_and_cache_flash
        flash_attn.get_flash_attn_version = lambda **kwargs: 2
        if self._kernel() == "xformers":
            from xformers.ops.fmha import cutlass

            cutlass.FwOp.OPERATOR = efficient_attention_forward
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKENDS[os.environ[STOCK]])
        selector._cached_get_attn_backend.cache_clear()

    def _kernel(self) -> Any:
        return os.environ[KERNEL]

    def _bind(self, worker: Any) -> None:
        super()._bind(worker)
        if self._kernel() == "xformers" or EvictingBuilderMixin.extends:
            return
        longest = self.model_config.max_model_len
        self.steps = []
        for groups in self.model_runner.attn_groups:
            for builder in (b for group in groups for b in group.metadata_builders):
                builder.build = Steps(builder, longest)
                self.steps.append(builder.build)
        self.graphs = []
        for name in self._evictable_layers:
            impl = self._layer(name).impl
            impl.forward = Layer(impl, self.steps)
            self.graphs.append(impl.forward)

"""The CUDA worker and its backends on a CPU: all but the FlashAttention kernel and the graphs.

Triton kernels run in the interpreter. FlashAttention's kernel and vLLM's two cache writers, which
ask for a CUDA device, are replaced by plain PyTorch that follows their documentation. A decode
step hands layers the metadata object of the first step with as many requests, as a captured
graph does: what a replay needs must therefore be refreshed in place.
"""

import os
from typing import Any

from vllm.v1.attention import selector
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.e2e.paged import flash_attn_varlen_func, reshape_and_cache_flash
from tests.efficient import efficient_attention_forward
from vllm_kvevict.worker.gpu import BACKENDS, EvictingWorker

STOCK, KERNEL = "KVEVICT_TEST_STOCK", "KVEVICT_TEST_KERNEL"


class Worker(EvictingWorker, CPUWorker):
    """The MRO is the CUDA worker's, with vLLM's CPU worker in the place of its CUDA worker."""

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
        for groups in self.model_runner.attn_groups:
            for builder in (b for group in groups for b in group.metadata_builders):
                builder.build = Replay(builder, self.model_config.max_model_len)
                builder.build.graphs = self._kernel() != "xformers"


class Replay:
    """``build`` of a builder; decode steps get the metadata of the first of their size."""

    def __init__(self, builder: Any, max_model_len: int) -> None:
        self._build = builder.build
        self._captured: dict[int, Any] = {}
        self._longest = max_model_len
        self.replays = 0
        self.graphs = True

    def __call__(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
        if common.max_query_len > 1 or not self.graphs:
            return self._build(prefix, common, fast_build)
        common = common.replace(max_seq_len=self._longest)
        fresh = self._build(prefix, common, fast_build)
        self.replays += common.num_reqs in self._captured
        return self._captured.setdefault(common.num_reqs, fresh)

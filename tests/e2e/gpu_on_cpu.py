"""The CUDA worker and its backends on a CPU: all but the FlashAttention kernel and the graphs.

Triton kernels run in the interpreter. FlashAttention's kernel and vLLM's two cache writers, which
ask for a CUDA device, are replaced by plain PyTorch that follows their documentation. A decode
step hands layers the metadata object of the first step with as many requests, as a captured
graph does: what a replay needs must therefore be refreshed in place.
"""

import os
from typing import Any

import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvevict.worker.gpu import BACKENDS, EvictingWorker

STOCK, KERNEL = "KVEVICT_TEST_STOCK", "KVEVICT_TEST_KERNEL"


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    softcap: float = 0.0,
    window_size: Any = None,
    **ignored: Any,
) -> None:
    """Causal paged attention, the mask aligned to the end; rows without a key become 0."""
    assert causal and q.shape[0] == out.shape[0] == int(cu_seqlens_q[-1])
    assert window_size in (None, [-1, -1])
    starts = cu_seqlens_q.tolist()
    page, group = k.shape[1], q.shape[1] // k.shape[2]
    for index, length in enumerate(seqused_k.tolist()):
        first, last = starts[index], starts[index + 1]
        assert last - first <= max_seqlen_q and length <= max_seqlen_k
        pages = block_table[index, : -(-length // page)].long()
        keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (k, v))
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        logits = torch.einsum("qhd,khd->hqk", q[first:last].double(), keys) * softmax_scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        position = torch.arange(last - first)[:, None] + length - (last - first)
        logits = logits.masked_fill(torch.arange(length) > position, float("-inf"))
        weights = logits.softmax(-1).nan_to_num(0.0)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *ignored: Any,
) -> None:
    """Write keys and values [T, H, D] to caches [blocks, block_size, H, D]."""
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    page = key_cache.shape[1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache[slots // page, slots % page] = new[: len(slot_mapping)][used]


class Worker(EvictingWorker, CPUWorker):
    """The MRO is the CUDA worker's, with vLLM's CPU worker in the place of its CUDA worker."""

    def _register_backend(self) -> None:
        flash_attn.flash_attn_varlen_func = flash_attn_varlen_func
        flash_attn.reshape_and_cache_flash = reshape_and_cache_flash
        triton_attn.triton_reshape_and_cache_flash = reshape_and_cache_flash
        flash_attn.get_flash_attn_version = lambda **kwargs: 2
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKENDS[os.environ[STOCK]])
        selector._cached_get_attn_backend.cache_clear()

    def _kernel(self) -> Any:
        return os.environ[KERNEL]

    def _bind(self, worker: Any) -> None:
        super()._bind(worker)
        for groups in self.model_runner.attn_groups:
            for builder in (b for group in groups for b in group.metadata_builders):
                builder.build = Replay(builder, self.model_config.max_model_len)


class Replay:
    """``build`` of a builder; decode steps get the metadata of the first of their size."""

    def __init__(self, builder: Any, max_model_len: int) -> None:
        self._build = builder.build
        self._captured: dict[int, Any] = {}
        self._longest = max_model_len
        self.replays = 0

    def __call__(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
        if common.max_query_len > 1:
            return self._build(prefix, common, fast_build)
        common = common.replace(max_seq_len=self._longest)
        fresh = self._build(prefix, common, fast_build)
        self.replays += common.num_reqs in self._captured
        return self._captured.setdefault(common.num_reqs, fresh)

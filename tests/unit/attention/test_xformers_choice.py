"""Where ``--kv-eviction-attention xformers`` works, and the sentence it gives where it does not."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_kvevict.attention.choice import arrange
from vllm_kvevict.attention.flash import EvictingFlashMetadataBuilder
from vllm_kvevict.attention.scratch import Scratch, Shape, power_of_two
from vllm_kvevict.attention.triton import EvictingTritonMetadataBuilder
from vllm_kvevict.attention.xformers import kernel as xformers
from vllm_kvevict.attention.xformers.kernel import GATHERED_BYTES
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.worker import gpu as gpu_worker
from vllm_kvevict.worker.gpu import EvictingWorker
from vllm_kvevict.worker.mixin import EvictionWorkerMixin
from vllm_kvevict.worker.workspace import Workspace

CONFIG = EvictionConfig(policy="snapkv", attention="xformers")


def refusal(vllm_config: Any) -> str:
    with pytest.raises(ValueError) as error:
        arrange(vllm_config, CONFIG)
    text = str(error.value)
    start = "KV eviction: --kv-eviction-attention xformers does not work here, because "
    assert text.startswith(start) and text.endswith(".") and "\n" not in text
    return text.removeprefix(start)


@pytest.mark.parametrize("capability", [(10, 0), (12, 0), (4, 0)])
def test_capability(build, gpu, capability):
    vllm_config = build(dtype="float16")
    gpu(*capability)
    assert refusal(vllm_config) == "xformers' CUTLASS op serves compute capabilities 5.0 to 9.0."


def test_not_installed(build, gpu, monkeypatch):
    vllm_config = build(dtype="float16")
    gpu(7, 5)
    monkeypatch.setitem(sys.modules, "xformers", None)
    assert "not installed (pip install xformers==0.0.35)" in refusal(vllm_config)


def test_bfloat16_before_ampere(build, gpu):
    vllm_config = build(dtype="bfloat16")
    gpu(7, 5)
    assert refusal(vllm_config) == "xformers has no kernel for bfloat16 on this GPU."
    gpu(8, 0)
    arrange(vllm_config, CONFIG)


def test_a_quantised_cache(build, gpu):
    vllm_config = build(dtype="float16")
    gpu(9, 0)
    vllm_config.cache_config.cache_dtype = "fp8"
    assert refusal(vllm_config) == "xformers cannot read a KV cache of fp8."


def test_a_head_size(build, gpu):
    vllm_config = build(dtype="float16", hf_overrides={"head_dim": 20})
    gpu(9, 0)
    assert refusal(vllm_config) == "xformers has no kernel for head size 20."


def test_soft_capped_logits(build, gpu):
    vllm_config = build(dtype="float16", hf_overrides={"attn_logit_softcapping": 30.0})
    gpu(9, 0)
    assert "does not cap attention logits" in refusal(vllm_config)


def worker(soft_cap: float, sinks: torch.Tensor | None = None) -> EvictingWorker:
    one = EvictingWorker.__new__(EvictingWorker)
    impl = SimpleNamespace(
        num_kv_heads=1, num_heads=2, head_size=32, logits_soft_cap=soft_cap, sinks=sinks
    )
    for name, value in dict(
        _kernel=lambda: "xformers",
        _layer=lambda name: SimpleNamespace(impl=impl),
        _evictable_layers=["a"],
        _evictable_specs=[SimpleNamespace(block_size=16)],
        _rings=None,
        _workspace=Workspace(0, torch.device("cpu")),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
        model_config=SimpleNamespace(max_model_len=64, dtype=torch.float32),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None, cache_dtype="auto"),
        device=torch.device("cpu"),
        eviction_config=CONFIG,
    ).items():
        setattr(one, name, value)
    return one


def test_a_layer_that_caps_logits_unannounced():
    with pytest.raises(ValueError, match="xformers does not work here, because xformers does not"):
        worker(soft_cap=30.0)._allocate_scratch()


def test_a_layer_with_attention_sinks():
    with pytest.raises(
        ValueError, match=r"xformers does not support attention sinks.*remove the flag"
    ):
        worker(soft_cap=0.0, sinks=torch.zeros(2))._allocate_scratch()


def test_memory_of_the_op_is_left_free(monkeypatch):
    monkeypatch.setattr(EvictionWorkerMixin, "determine_available_memory", lambda self: 10**9)
    monkeypatch.setattr(gpu_worker, "table_bytes", lambda *arguments: 0)
    one = worker(soft_cap=0.0)
    one.vllm_config = None
    assert one.determine_available_memory() == 10**9
    assert one._scratch.shape.itemsize == 4
    one._scratch.optional.paged = True
    assert one.determine_available_memory() == 10**9 - one._scratch.op_bytes < 10**9


@pytest.mark.parametrize("builder", [EvictingFlashMetadataBuilder, EvictingTritonMetadataBuilder])
def test_no_full_graphs(build, builder):
    vllm_config = build(dtype="float16")
    vllm_config.additional_config[CONFIG_KEY] = CONFIG.model_dump(mode="json")
    assert builder.get_cudagraph_support(vllm_config, None) is AttentionCGSupport.NEVER
    vllm_config.additional_config[CONFIG_KEY]["attention"] = "triton"
    support = builder.get_cudagraph_support(vllm_config, None)
    assert support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def test_our_numbers_are_those_of_the_ops():
    from xformers.ops.fmha import attn_bias, cutlass, triton_splitk

    paged = attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
    padded = attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask
    one, other = triton_splitk.FwOp, cutlass.FwOp
    assert paged in one.SUPPORTED_ATTN_BIAS_TYPES and padded in other.SUPPORTED_ATTN_BIAS_TYPES
    assert paged not in other.SUPPORTED_ATTN_BIAS_TYPES
    assert xformers.PAGED_FROM == one.CUDA_MINIMUM_COMPUTE_CAPABILITY
    assert {torch.float16, torch.bfloat16} == one.SUPPORTED_DTYPES
    limits = (other.CUDA_MINIMUM_COMPUTE_CAPABILITY, other.CUDA_MAXIMUM_COMPUTE_CAPABILITY)
    assert limits == xformers.GATHERED
    dtypes = {getattr(torch, name) for name in xformers.DTYPES}
    assert dtypes == other.SUPPORTED_DTYPES
    for size in range(8, 513, 8):
        served = not one.shape_not_supported_reasons(1, 1, size, size)
        assert served == xformers.takes_pages((8, 0), 2, size)
        assert not other.shape_not_supported_reasons(1, 1, size, size)
    assert not xformers.takes_pages((7, 5), 2, 128)
    assert not xformers.takes_pages((9, 0), 4, 128)


def test_the_ops_know_nothing_of_soft_caps():
    from xformers.ops.fmha.common import Inputs

    assert "softcap" not in " ".join(inspect.signature(Inputs).parameters)


def test_scratch():
    """A page table and the stated bytes, more where one sequence needs them."""
    small = Shape(2, 4, 64, 16, max_requests=5, max_model_len=4096)
    scratch = Scratch("xformers", small, torch.device("cpu"))
    assert scratch.table.shape == (16, 256) and scratch.optional.dense.numel() == GATHERED_BYTES
    assert scratch.num_bytes == GATHERED_BYTES + 16 * 256 * 4
    assert scratch.optional.gathered(256) == GATHERED_BYTES // (4096 * 2 * 64 * 2)
    assert scratch.pages(10, 33).shape == (10, 4) and scratch.pages(10, 4096).shape == (10, 256)
    assert not scratch.optional.paged and scratch.op_bytes == 0
    scratch.optional.paged = True
    assert scratch.op_bytes == 1024 * (32 * 64 * 4 + 4 * 8)
    for name in ("flash", "triton"):
        reserved = Scratch(name, small, torch.device("cpu")).table
        assert reserved.shape == (10, 256), "mixed steps would make a table of their own"
    narrow = Scratch("xformers", Shape(1, 1, 8, 16, 1, 64), torch.device("meta"))
    assert narrow.optional.gathered(1) == 2**15
    long = Shape(2, 4, 256, 16, max_requests=1, max_model_len=2**20)
    scratch = Scratch("xformers", long, torch.device("meta"))
    assert (
        scratch.optional.dense.numel() == 2**20 * 2 * 256 * 2
        and scratch.optional.gathered(2**16) == 1
    )


def test_power_of_two():
    assert [power_of_two(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]

"""Which attention runs evicted requests on a GPU, and what the flag refuses."""

import __future__

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvevict.attention import choice
from vllm_kvevict.attention.choice import arrange, choose
from vllm_kvevict.attention.flash import EvictingFlashMetadataBuilder
from vllm_kvevict.attention.triton import EvictingTritonMetadataBuilder
from vllm_kvevict.config.config import EvictionConfig
from vllm_kvevict.worker.gpu import BACKENDS


def config(attention: str = "auto") -> EvictionConfig:
    return EvictionConfig(policy="snapkv", attention=attention)


@pytest.mark.parametrize(
    ("capability", "dtype", "attention", "expected"),
    [
        ((9, 0), "bfloat16", "auto", ("triton", "FLASH_ATTN")),
        ((9, 0), "bfloat16", "flash", ("flash", "FLASH_ATTN")),
        ((10, 0), "bfloat16", "auto", ("flash", "FLASH_ATTN")),
        ((8, 0), "float16", "flash", ("flash", "FLASH_ATTN")),
        ((8, 0), "float16", "auto", ("triton", "FLASH_ATTN")),
        ((10, 0), "bfloat16", "auto", ("flash", "FLASH_ATTN")),
        ((12, 0), "bfloat16", "auto", ("triton", "FLASH_ATTN")),
        ((9, 0), "bfloat16", "triton", ("triton", "FLASH_ATTN")),
        ((7, 5), "float16", "auto", ("triton", "TRITON_ATTN")),
        ((9, 0), "float32", "auto", ("triton", "TRITON_ATTN")),
        ((9, 0), "bfloat16", "xformers", ("xformers", "FLASH_ATTN")),
        ((7, 5), "float16", "xformers", ("xformers", "TRITON_ATTN")),
        ((7, 5), "float32", "xformers", ("xformers", "TRITON_ATTN")),
    ],
)
def test_kernel_and_stock_backend(build, gpu, capability, dtype, attention, expected):
    vllm_config = build(dtype=dtype)
    gpu(*capability)
    assert choose(vllm_config, config(attention)) == expected
    arrange(vllm_config, config(attention))
    assert vllm_config.attention_config.backend is AttentionBackendEnum[expected[1]]
    assert expected[1] in BACKENDS
    arrange(vllm_config, config(attention))  # again, as further engines of a process do


def backends_of_vllm(capability: DeviceCapability) -> list[AttentionBackendEnum]:
    """vLLM's order of backends. Its module does not import in a CPU build, so it is read."""
    path = Path(vllm.__file__).parent / "platforms" / "cuda.py"
    defined = [one for one in ast.parse(path.read_text()).body if isinstance(one, ast.FunctionDef)]
    mine = [one for one in defined if one.name == "_get_backend_priorities"]
    mine[0].decorator_list = []
    names = {"AttentionBackendEnum": AttentionBackendEnum}
    code = compile(ast.Module(mine, []), path, "exec", __future__.annotations.compiler_flag)
    exec(code, names)
    return names["_get_backend_priorities"](False, capability)


@pytest.mark.parametrize(
    ("capability", "dtype", "replaced"),
    [
        ((10, 0), "bfloat16", "FLASH_ATTN"),
        ((10, 3), "float16", "FLASH_ATTN"),
        ((10, 0), "float32", None),
        ((9, 0), "bfloat16", None),
        ((12, 0), "bfloat16", None),
    ],
)
def test_the_backend_that_is_replaced_is_named(
    build, gpu, capability, dtype, replaced, monkeypatch
):
    """vLLM's own order says which; the oracle asks it."""
    vllm_config = build(dtype=dtype)
    gpu(*capability)
    default = backends_of_vllm(DeviceCapability(*capability))[0]
    # FlashInfer, too, has no float32.
    preferred = default is AttentionBackendEnum.FLASHINFER and dtype != "float32"
    assert preferred == (replaced is not None)
    said: list[str] = []
    heard = SimpleNamespace(warning=lambda message, *values: said.append(message % values))
    monkeypatch.setattr(choice, "_logger", lambda: heard)
    for _ in range(2):
        arrange(vllm_config, config())
    assert len(said) == (replaced is not None)
    for line in said:
        assert f"by {replaced} for all requests" in line
        assert "--attention-backend FLASHINFER" in line
    # Who names a backend gets no line, as the second of the calls above.


def test_without_its_newest_version_flash_attention_is_version_2(build, gpu, monkeypatch):
    vllm_config = build(dtype="bfloat16")
    gpu(9, 0)
    monkeypatch.setattr(choice, "loads", lambda version: version < 3)
    assert choose(vllm_config, config()) == ("triton", "FLASH_ATTN")


def test_flash_where_it_cannot_run(build, gpu):
    vllm_config = build(dtype="float32")
    gpu(9, 0)
    with pytest.raises(ValueError, match="--kv-eviction-attention flash does not work here"):
        arrange(vllm_config, config("flash"))
    vllm_config = build(dtype="float16")
    gpu(7, 5)
    with pytest.raises(ValueError, match=r"needs compute capability 8\.0"):
        arrange(vllm_config, config("flash"))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), ("flash", "FLASH_ATTN")),
        ((10, 0), ("flash", "FLASH_ATTN")),
        ((8, 9), ("triton", "TRITON_ATTN")),
        ((12, 0), ("triton", "TRITON_ATTN")),
    ],
)
def test_an_fp8_cache(build, gpu, capability, expected):
    vllm_config = build(dtype="bfloat16", kv_cache_dtype="fp8")
    gpu(*capability)
    assert choose(vllm_config, config()) == expected
    if expected[0] != "flash":
        with pytest.raises(ValueError, match="FlashAttention reads FP8 KV caches on"):
            choose(vllm_config, config("flash"))


@pytest.mark.parametrize("names", [{"model_type": "gpt_oss"}, {"add_attention_sink_bias": True}])
def test_attention_sinks(build, gpu, names):
    vllm_config = build(dtype="bfloat16")
    for name, value in names.items():
        setattr(vllm_config.model_config.hf_text_config, name, value)
    gpu(9, 0)
    assert choose(vllm_config, config()) == ("triton", "FLASH_ATTN")
    assert choose(vllm_config, config("flash")) == ("flash", "FLASH_ATTN")
    gpu(8, 9)
    assert choose(vllm_config, config()) == ("triton", "TRITON_ATTN")


def test_on_rocm(build, gpu, monkeypatch):
    from vllm.platforms import current_platform

    vllm_config = build(dtype="bfloat16")
    gpu(9, 4)
    monkeypatch.setattr(current_platform, "is_rocm", lambda: True)
    arrange(vllm_config, config())
    assert vllm_config.attention_config.backend is AttentionBackendEnum.TRITON_ATTN
    assert choose(vllm_config, config()) == ("triton", "TRITON_ATTN")
    for attention in ("flash", "xformers"):
        with pytest.raises(ValueError, match=f"--kv-eviction-attention {attention} .*NVIDIA GPUs"):
            choose(vllm_config, config(attention))


def test_another_attention_backend(build, gpu):
    vllm_config = build(dtype="bfloat16")
    gpu(9, 0)
    vllm_config.attention_config.backend = AttentionBackendEnum.FLASHINFER
    with pytest.raises(ValueError, match="cannot use --attention-backend FLASHINFER: remove"):
        arrange(vllm_config, config())


def test_the_flag_on_the_cpu_build(build):
    for attention in ("flash", "triton", "xformers"):
        with pytest.raises(ValueError, match=f"--kv-eviction-attention {attention} needs a GPU"):
            build({"policy": "snapkv", "attention": attention})
    build({"policy": "snapkv", "attention": "auto"})


def test_unknown_value():
    words = "--kv-eviction-attention: must be 'auto', 'flash', 'triton' or 'xformers', not 'fa'"
    with pytest.raises(ValueError, match=words):
        EvictionConfig.parse({"policy": "snapkv", "attention": "fa"})


def test_no_group_reuses_the_metadata_of_another():
    """Model Runner V1 would give the second of two equal groups the first one's heads."""
    assert not EvictingFlashMetadataBuilder.supports_update_block_table
    assert not EvictingTritonMetadataBuilder.supports_update_block_table

"""Choice of the attention kernel of evicted requests, made before workers start."""

from typing import TYPE_CHECKING, Any, cast

from vllm_kvevict.attention.kernels import optional_kernel
from vllm_kvevict.config.names import CONFIG_KEY
from vllm_kvevict.ops.fp8 import CACHE_DTYPES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvevict.attention.scratch import Kernel
    from vllm_kvevict.config.config import EvictionConfig

FLAG = "--kv-eviction-attention"


def flash_problem(vllm_config: "VllmConfig") -> str | None:
    """Return the reason why FlashAttention cannot run this model on this GPU; None if it can."""
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        return "it is vLLM's FlashAttention for NVIDIA GPUs"
    capability = current_platform.get_device_capability()
    if capability is None or capability < (8, 0):
        return "FlashAttention needs compute capability 8.0"
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in ("float16", "bfloat16"):
        return f"FlashAttention has no kernel for {dtype}"
    size = model.get_head_size()
    if size % 8 or size > 256 or (size == 256 and capability.major in (10, 11)):
        return f"FlashAttention has no kernel for head size {size} and these pages on this GPU"
    if capability < (9, 0) and _names_sinks(model.hf_text_config):
        return "FlashAttention takes attention sinks on compute capability 9.0 and newer only"
    # vLLM uses FlashAttention 3 on 9.0 and 4 on 10.x. Other versions do not read FP8.
    if vllm_config.cache_config.cache_dtype in CACHE_DTYPES and capability.major not in (9, 10):
        return "FlashAttention reads FP8 KV caches on compute capability 9.0 and 10.x only"
    return None


def _names_sinks(text: Any) -> bool:
    """Return True if a model's configuration mentions attention sinks.

    The layers are checked later, when they exist.
    """
    named = any("sink" in name and value for name, value in text.to_dict().items())
    return named or text.model_type == "gpt_oss"


def choose(vllm_config: "VllmConfig", config: "EvictionConfig") -> tuple["Kernel", str]:
    """Choose the kernel of evicted requests on CUDA, and vLLM's backend for the other requests.

    Returns:
        ``flash``, ``triton`` or ``xformers`` (only if the flag selects it), and the name of the
        backend of vLLM from which the evicting backend is derived.

    Raises:
        ValueError: The flag's value is not supported here. The message gives the reason.

    """
    problem = flash_problem(vllm_config)
    if config.attention == "flash" and problem:
        raise ValueError(f"KV eviction: {FLAG} flash does not work here, because {problem}.")
    if (optional := optional_kernel(config.attention)) is not None:
        if obstacle := optional.problem(vllm_config):
            raise ValueError(
                f"KV eviction: {FLAG} {config.attention} does not work here, because {obstacle}."
            )
        return cast("Kernel", config.attention), "TRITON_ATTN" if problem else "FLASH_ATTN"
    triton = config.attention == "triton" or problem or _is_slower(vllm_config, config)
    kernel: Kernel = "triton" if triton else "flash"
    return kernel, "TRITON_ATTN" if problem else "FLASH_ATTN"


def _is_slower(vllm_config: "VllmConfig", config: "EvictionConfig") -> bool:
    """Return True if ``auto`` should not decode with FlashAttention, which would run here.

    On an H100 the Triton kernel was faster than FlashAttention 3 in every measured batch
    (docs/gpu.md). FP8 caches and FlashAttention 4 were not measured.
    """
    if config.attention != "auto":
        return False
    version = _flash_version(vllm_config)
    return version == 2 or (
        version == 3 and vllm_config.cache_config.cache_dtype not in CACHE_DTYPES
    )


def _flash_version(vllm_config: "VllmConfig") -> int:
    """Return the version of vLLM's FlashAttention; 2 splits keys only for a few sequences."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    assert capability is not None
    version = vllm_config.attention_config.flash_attn_version
    version = version or {9: 3, 10: 4}.get(capability.major, 2)
    return version if loads(version) else 2


def loads(version: int) -> bool:
    """Return True if this installation has a version of vLLM's FlashAttention."""
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    return bool(is_fa_version_supported(version))


def kernel_asked(vllm_config: "VllmConfig") -> str:
    """Return the flag's value if eviction is on, else ``auto``."""
    settings = vllm_config.additional_config.get(CONFIG_KEY)
    return settings["attention"] if isinstance(settings, dict) else "auto"


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.kv_eviction.attention")


def arrange(vllm_config: "VllmConfig", config: "EvictionConfig") -> None:
    """Make vLLM select the backend that the evicting backend replaces.

    Args:
        vllm_config: Changed in place, on CUDA.
        config: The configuration of eviction.

    Raises:
        ValueError: A flag does not fit this platform or model. The message gives the reason.

    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        if config.attention != "auto":
            raise ValueError(
                f"KV eviction: {FLAG} {config.attention} needs a GPU; with the CPU build of vLLM, "
                "remove the flag or set it to auto."
            )
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    _, name = choose(vllm_config, config)
    backend = AttentionBackendEnum[name]
    asked = vllm_config.attention_config.backend
    if asked not in (None, backend):
        raise ValueError(
            f"KV eviction runs on top of {name} here and cannot use --attention-backend "
            f"{asked.name}: remove that flag; {FLAG} chooses the kernel of evicted requests."
        )
    capability = current_platform.get_device_capability()
    half = str(vllm_config.model_config.dtype) in ("torch.float16", "torch.bfloat16")
    blackwell = current_platform.is_cuda() and capability is not None and capability.major == 10
    if asked is None and blackwell and half:
        # vLLM's order of backends (platforms/cuda.py) begins with FlashInfer on these GPUs.
        _logger().warning(
            "KV eviction replaces FLASHINFER, which vLLM prefers on this GPU, by %s for all "
            "requests, which may be slower. vllm bench throughput --model MODEL "
            "--attention-backend FLASHINFER, and the same with %s, compare them without eviction.",
            name,
            name,
        )
    vllm_config.attention_config.backend = backend

"""The type in which a CPU multiplies matrices fast."""

from typing import Any

FASTER = "computing in float32, which this CPU multiplies faster than bfloat16"

SLOW = "bfloat16", "float16", "half"
"""Types that a CPU without instructions for them converts to float32 for each product."""


def lacks_bfloat16() -> bool:
    """Return whether vLLM runs on a CPU that multiplies float32 several times faster than bfloat16.

    It has neither AVX-512 with bfloat16 nor AMX, or ``ONEDNN_MAX_CPU_ISA`` keeps oneDNN from using
    them. With AVX2 alone float32 was 6 times faster.
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    known = torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported
    has_instructions = any(supported() for supported in known)
    return not (has_instructions and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fast_dtype() -> str:
    """Return the faster of ``float32`` and ``bfloat16`` here."""
    return "float32" if lacks_bfloat16() else "bfloat16"


def in_fast_dtype(engine_args: Any) -> Any:
    """Return a copy of vLLM's ``EngineArgs`` that computes in float32 if this CPU is faster so.

    Only where no type was asked for, and weights are not quantised: their kernels have types of
    their own.
    """
    from dataclasses import replace

    if engine_args.dtype != "auto" or not lacks_bfloat16():
        return engine_args
    if engine_args.create_model_config().quantization is not None:
        return engine_args
    return replace(engine_args, dtype="float32")


if __name__ == "__main__":
    print(fast_dtype())

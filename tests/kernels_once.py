"""vLLM's CPU platform replaces Triton kernels once in a process, not in each worker that starts.

It looks through all modules for them, a quarter of a second each time.
"""

from functools import cache

from vllm.platforms.cpu import CpuPlatform

CpuPlatform.register_triton_kernel_overrides = staticmethod(  # type: ignore[method-assign]
    cache(CpuPlatform.register_triton_kernel_overrides)
)

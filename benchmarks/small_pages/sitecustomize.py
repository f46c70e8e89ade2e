"""Blocks of 16 tokens on a CPU, for measurements only: PYTHONPATH=benchmarks/small_pages.

vLLM's CPU attention has a kernel for them (`vec16`) and does not offer it (`MultipleOf(32)` in
`cpu_attn.py`, vLLM 0.32). Python runs this file first in every process that finds it; it lets vLLM
and the start-up checks of this plugin take such blocks.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _offer(cpu_attn: Any) -> None:
    multiple = type(cpu_attn.CPUAttentionBackend.get_supported_kernel_block_sizes()[0])
    offered = staticmethod(lambda kv_cache_spec=None: [multiple(16)])
    cpu_attn.CPUAttentionBackend.get_supported_kernel_block_sizes = offered


def _accept(support: Any) -> None:
    support.REFUSALS = tuple(one for one in support.REFUSALS if one.what != "this block size")


AFTER: dict[str, Callable[[Any], None]] = {
    "vllm.v1.attention.backends.cpu_attn": _offer,
    "vllm_kvevict.front.support": _accept,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Changes a module of :data:`AFTER` when it has been read."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None
        read = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            read(module)
            AFTER[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())

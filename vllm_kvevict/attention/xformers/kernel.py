"""The xformers kernel, and the cases that its two ops support.

They are checked without importing xformers, because an import initializes CUDA. The split-K op
supports paged biases, for compute capability 8.0 and newer and single query tokens. The CUTLASS op
runs all other cases, over keys gathered from the pages.
"""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vllm_kvevict.attention.kernels import OptionalKernel, Shape
from vllm_kvevict.attention.sequences import Extend
from vllm_kvevict.attention.xformers.parts import LAUNCH, SPLITS, Part, cut
from vllm_kvevict.rules.rule import blocks_for

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PAGED_FROM = (8, 0)
PAGED_SIZES = (16, 32, 64, 128, 256, 512)
GATHERED = ((5, 0), (9, 0))
DTYPES = ("float16", "bfloat16", "float32")
MEASURE = 8
"""Both ops need head sizes that are multiples of it."""
GATHERED_BYTES = 2**27
"""Bytes of keys and values that one call of the CUTLASS op reads, unless one sequence has more."""


def takes_pages(capability: tuple[int, int], itemsize: int, head_size: int) -> bool:
    """Return True if single query tokens run on pages, without gathering.

    Args:
        capability: The GPU's compute capability.
        itemsize: Bytes of an element of queries and cache.
        head_size: D.

    """
    return capability >= PAGED_FROM and itemsize == 2 and head_size in PAGED_SIZES


class Xformers(OptionalKernel):
    """xformers' memory-efficient attention.

    ``dense`` [bytes] is the buffer of gathered pages. ``paged`` is True if single query tokens run
    on pages.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        from vllm.platforms import current_platform

        self.shape = shape
        pages = blocks_for(shape.max_model_len, shape.block_size)
        size = max(GATHERED_BYTES, pages * self._page_bytes)
        self.dense = torch.zeros(size, dtype=torch.uint8, device=device)
        self._attend: Callable[..., None] | None = None
        capability = current_platform.get_device_capability()
        self.paged = capability is not None and takes_pages(
            tuple(capability), shape.itemsize, shape.head_size
        )

    @classmethod
    def problem(cls, vllm_config: "VllmConfig") -> str | None:
        from vllm.platforms import current_platform

        if importlib.util.find_spec("xformers") is None:
            return "xformers is not installed (pip install xformers==0.0.35)"
        if current_platform.is_rocm():
            return "xformers' CUTLASS op is for NVIDIA GPUs"
        capability = current_platform.get_device_capability()
        if capability is None or not GATHERED[0] <= tuple(capability) <= GATHERED[1]:
            return "xformers' CUTLASS op serves compute capabilities 5.0 to 9.0"
        model = vllm_config.model_config
        dtype = str(model.dtype).removeprefix("torch.")
        if dtype not in DTYPES or (dtype == "bfloat16" and tuple(capability) < (8, 0)):
            return f"xformers has no kernel for {dtype} on this GPU"
        cache = vllm_config.cache_config.cache_dtype
        if cache not in ("auto", dtype):
            return f"xformers cannot read a KV cache of {cache}"
        if model.get_head_size() % MEASURE:
            return f"xformers has no kernel for head size {model.get_head_size()}"
        if getattr(model.hf_text_config, "attn_logit_softcapping", None):
            return "xformers does not cap attention logits, which this model needs"
        return None

    @classmethod
    def layer_problem(cls, soft_caps: bool, sinks: bool) -> str | None:
        if soft_caps:
            return "xformers does not cap attention logits, which this model needs"
        if sinks:
            return (
                "xformers does not support attention sinks, which this model needs; remove the flag"
            )
        return None

    @property
    def num_bytes(self) -> int:
        return self.dense.numel()

    @property
    def op_bytes(self) -> int:
        """Bytes of the partial sums of the paged op, in float32 for a multiple of 32 rows."""
        rows = -(-self.shape.group // 32) * 32
        split = rows * self.shape.head_size * 4 + self.shape.group * 8
        return SPLITS * split if self.paged else 0

    def load(self) -> None:
        # Imported here because xformers is optional and takes about a second to import.
        from vllm_kvevict.attention.xformers import attend as loaded

        self._attend = loaded.attend

    def plan(self, starts: list[int], on_device: torch.Tensor, columns: int) -> list[Part]:
        return cut(starts, on_device, self.gathered(columns))

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        step: Extend,
        lengths: torch.Tensor,
        scale: float,
        table: torch.Tensor,
    ) -> None:
        on_pages = self.paged and step.max_query_len == 1 and len(lengths) <= LAUNCH
        dense = None if on_pages else self.dense
        assert self._attend is not None, "not loaded"
        self._attend(query, kv_cache, out, step, lengths, scale, table, dense)

    def gathered(self, columns: int) -> int:
        """Return the number of sequences of ``columns`` pages that the buffer holds."""
        return min(LAUNCH, self.dense.numel() // (columns * self._page_bytes))

    @property
    def _page_bytes(self) -> int:
        return self.shape.block_size * 2 * self.shape.head_size * self.shape.itemsize

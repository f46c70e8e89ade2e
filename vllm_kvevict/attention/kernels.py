"""Kernels of other libraries, which run evicted requests on a GPU if a flag chooses them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vllm_kvevict.attention.sequences import Extend

OPTIONAL = {"xformers": "vllm_kvevict.attention.xformers.kernel:Xformers"}
"""Class of each optional kernel, as ``module:Class``, by the value of the flag."""


@dataclass(frozen=True)
class Shape:
    """The evictable layers of one rank, and the batches that it runs."""

    num_heads: int
    group: int
    head_size: int
    block_size: int
    max_requests: int
    max_model_len: int
    itemsize: int = 2
    fp8: bool = False


class OptionalKernel(ABC):
    """Runs every step of evicted requests as an :class:`Extend`, in no FULL graph.

    Args:
        shape: The evictable layers.
        device: Where attention runs; ``meta`` to count the bytes.

    """

    @abstractmethod
    def __init__(self, shape: Shape, device: "torch.device") -> None: ...

    @classmethod
    @abstractmethod
    def problem(cls, vllm_config: Any) -> str | None:
        """Why it cannot serve this model on this GPU; None if it can. Imports no library."""

    @classmethod
    @abstractmethod
    def layer_problem(cls, soft_caps: bool, sinks: bool) -> str | None:
        """Why it cannot serve layers that cap logits or have attention sinks; None if it can."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of its buffers."""

    @property
    @abstractmethod
    def op_bytes(self) -> int:
        """Bytes that its ops allocate at most."""

    @abstractmethod
    def load(self) -> None:
        """Import the library, at start-up."""

    @abstractmethod
    def plan(self, starts: list[int], on_device: "torch.Tensor", columns: int) -> Sequence[Any]:
        """Cut N sequences into the calls of a step, for :attr:`Extend.parts`.

        Args:
            starts: [N + 1] first query of each sequence, and the end.
            on_device: The same, [N + 1] int32.
            columns: Pages of a row of the page table.

        """

    @abstractmethod
    def attend(
        self,
        query: "torch.Tensor",
        kv_cache: "torch.Tensor",
        out: "torch.Tensor",
        step: "Extend",
        lengths: "torch.Tensor",
        scale: float,
        table: "torch.Tensor",
    ) -> None:
        """Causal attention of N sequences with G query heads and one KV head.

        Args:
            query: [queries, G, D], sequence by sequence.
            kv_cache: [num_blocks, H, block_size, 2 * D], contiguous.
            out: [queries, G, D], written in place.
            step: The sequences; their page table is written for this layer.
            lengths: [N] int32 cached tokens.
            scale: Factor on query-key products.
            table: [power of two, V or more] int32: the buffer that the page table of the step
                begins.

        """


def optional_kernel(name: str) -> type[OptionalKernel] | None:
    """The optional kernel that a value of the flag names; None for a kernel of vLLM or our own."""
    found: type[OptionalKernel] | None = resolve_name(OPTIONAL[name]) if name in OPTIONAL else None
    return found


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()

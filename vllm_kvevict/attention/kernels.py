"""Optional attention kernels of other libraries, which a flag selects for evicted requests."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vllm_kvevict.attention.sequences import Extend

OPTIONAL = {"xformers": "vllm_kvevict.attention.xformers.kernel:Xformers"}
"""Class of each optional kernel as ``module:Class``, by the value of the flag."""


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
    """A kernel that runs every step of evicted requests as an :class:`Extend`, without FULL graphs.

    Args:
        shape: Shape of the evictable layers.
        device: Device of attention; ``meta`` to count the bytes.

    """

    @abstractmethod
    def __init__(self, shape: Shape, device: "torch.device") -> None: ...

    @classmethod
    @abstractmethod
    def problem(cls, vllm_config: Any) -> str | None:
        """Return why the kernel cannot run this model on this GPU; None if it can.

        It does not import the library.
        """

    @classmethod
    @abstractmethod
    def layer_problem(cls, soft_caps: bool, sinks: bool) -> str | None:
        """Return why the kernel cannot run layers with soft caps or sinks; None if it can."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the kernel's buffers."""

    @property
    @abstractmethod
    def op_bytes(self) -> int:
        """Maximum number of bytes that the kernel's ops allocate."""

    @abstractmethod
    def load(self) -> None:
        """Import the library, at start-up."""

    @abstractmethod
    def plan(self, starts: list[int], on_device: "torch.Tensor", columns: int) -> Sequence[Any]:
        """Cut N sequences into the calls of a step, for :attr:`Extend.parts`.

        Args:
            starts: [N + 1] index of the first query of each sequence, and the end.
            on_device: ``starts`` on the device, [N + 1] int32.
            columns: Pages in a row of the page table.

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
        """Compute causal attention of N sequences with G query heads and one KV head.

        Args:
            query: [queries, G, D], ordered by sequence.
            kv_cache: [num_blocks, H, block_size, 2 * D], contiguous.
            out: [queries, G, D], written in place.
            step: The sequences; their page table is written for this layer.
            lengths: [N] int32 cached tokens.
            scale: Factor of query-key products.
            table: [power of two, at least V] int32 buffer that begins with the page table of the
                step.

        """


def optional_kernel(name: str) -> type[OptionalKernel] | None:
    """Return the optional kernel that a value of the flag names; None for built-in kernels."""
    kernel: type[OptionalKernel] | None = resolve_name(OPTIONAL[name]) if name in OPTIONAL else None
    return kernel


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()

"""Scratch buffers of per-head attention on a GPU, at fixed addresses for CUDA graphs."""

from typing import Literal

import torch

from vllm_kvevict.attention.kernels import Shape as Shape
from vllm_kvevict.attention.kernels import optional_kernel, power_of_two
from vllm_kvevict.ops.token_format import AS_CACHED, PackedFormat, TokenFormat
from vllm_kvevict.ops.triton.merge import Partials
from vllm_kvevict.ops.triton.packed import PackedStores
from vllm_kvevict.ops.triton.residency import Residency, resident
from vllm_kvevict.rules.rule import blocks_for

Kernel = Literal["flash", "triton", "xformers"]

MIN_SLICE = 64
"""Minimum number of keys of a program of the Triton decode kernel."""
BEFORE_SEQUENCE = 96
"""Keys that a program of it could read in the time with which a sequence begins: three loads that
depend on each other, and the result of the sequence before. An estimate."""
MAX_SEQUENCES = 992
"""Maximum number of sequences of a call for which FlashAttention 3 splits keys."""
MAX_SPLITS = 32
"""Maximum number of splits of a sequence in FlashAttention, as vLLM bounds them in graphs."""
PARTIAL_BYTES = 2**27
"""Bytes of partial sums that FlashAttention 3 may allocate for the splits of one layer."""

DENSE_BYTES = 2**26
"""Bytes of the unpacked tokens of a step with several query tokens a request, unless one request
has more."""


class Scratch:
    """Scratch buffers of attention, shared by all layers, which run in sequence.

    Args:
        kernel: ``flash`` and ``triton`` need the page table of one layer and the partial sums of
            the Triton decode kernel. An optional kernel needs a page table and has its own buffers.
        shape: Shape of the evictable layers.
        device: Device of attention; ``meta`` to count the bytes.
        token_format: Format of the tokens of stores.

    """

    def __init__(
        self,
        kernel: Kernel,
        shape: Shape,
        device: torch.device,
        token_format: TokenFormat = AS_CACHED,
    ) -> None:
        self.kernel = kernel
        self.shape = shape
        self.resident, processors = Residency(8, 1, 1), 1
        if device.type != "cpu" and torch.cuda.is_available():
            gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
            self.resident = resident(
                shape.head_size,
                shape.itemsize,
                shape.fp8,
                gpu.shared_memory_per_multiprocessor,
                isinstance(token_format, PackedFormat),
            )
            processors = gpu.multi_processor_count
        sequences = shape.max_requests * shape.num_heads
        optional = optional_kernel(kernel)
        self.optional = optional(shape, device) if optional is not None else None
        self.programs = 0 if self.optional else self.resident.programs * processors
        self.partials = Partials.room(self.programs, shape.group, shape.head_size, device)
        self.packed: PackedStores | None = None
        if isinstance(token_format, PackedFormat):
            self.packed = PackedStores.of(token_format, shape.head_size, shape.block_size, device)
        rows = power_of_two(sequences) if self.optional else sequences
        pages = blocks_for(shape.max_model_len, shape.block_size)
        self.table = torch.zeros(rows, pages, dtype=torch.int32, device=device)

    def reset(self) -> None:
        """Write what kernels expect before their first launch, whatever the memory holds."""
        self.table.zero_()
        self.partials.arrived.zero_()
        if self.packed is not None:
            self.packed.reset()

    @property
    def num_bytes(self) -> int:
        table = self.table.numel() * self.table.element_size()
        return table + (self.optional.num_bytes if self.optional else self.partials.num_bytes)

    def stages(self, sequences: int) -> int:
        """Return ``num_stages`` of the Triton decode kernel for so many sequences."""
        return self.resident.few if sequences <= self.programs else self.resident.many

    def by_slices(self, requests: int) -> bool:
        """Return True if decode steps run the Triton decode kernel, False for FlashAttention.

        The result depends only on the number of requests, so it is the same for all steps of a
        graph. Only the Triton decode kernel reads stores in few bits.
        """
        if self.packed is not None:
            return True
        sequences = requests * self.shape.num_heads
        return self.kernel == "triton" or (self.kernel == "flash" and sequences > MAX_SEQUENCES)

    def flash_splits(self, tokens: int, max_splits: int = MAX_SPLITS) -> int:
        """Return the splits per sequence for FlashAttention 3, which allocates their partial sums.

        Without a bound, it allocates as many splits as would fill the GPU with a single sequence.
        Each head is a sequence here, so this takes gigabytes for some thousand query tokens.

        Args:
            tokens: Query tokens of the step.
            max_splits: Upper bound of the result.

        """
        shape = self.shape
        split = tokens * shape.num_heads * shape.group * (shape.head_size + 1) * 4
        return max(1, min(max_splits, PARTIAL_BYTES // max(1, split)))

    @property
    def op_bytes(self) -> int:
        """Maximum number of bytes that attention allocates, for partial sums of splits and unpacked
        tokens."""
        if self.optional is not None:
            return self.optional.op_bytes
        shape, dense = self.shape, 0
        if self.packed is not None:
            token = shape.num_heads * 2 * shape.head_size * shape.itemsize
            dense = max(DENSE_BYTES, shape.max_model_len * token)
        return dense + (PARTIAL_BYTES if self.kernel == "flash" else 0)

    def pages(self, sequences: int, longest: int) -> torch.Tensor:
        """Return a view [sequences, V] int32 of the page table, for at most ``longest`` tokens.

        V is a power of two, bounded by the width of the table, so that kernels are compiled for few
        widths.
        """
        columns = power_of_two(blocks_for(longest, self.shape.block_size))
        return self.table[:sequences, :columns]

"""Device memory in which evictions run: its size, and a pool that is allocated at start-up."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_kvevict.ops import pieces
from vllm_kvevict.ops.cuda.limits import CHUNK, HEAD_SIZES, rows_at_once
from vllm_kvevict.ops.cuda.pages import STAGING_BYTES
from vllm_kvevict.ops.torch import score
from vllm_kvevict.policies.kernels import has_kernels
from vllm_kvevict.policies.registry import build_policies
from vllm_kvevict.policies.requirements import floats_per_token, policy_requirements
from vllm_kvevict.rules.rule import blocks_for

if TYPE_CHECKING:
    from vllm_kvevict.cache.spec import EvictableAttentionSpec
    from vllm_kvevict.config.config import EvictionConfig

KERNEL_BYTES = 256 * 2**20
"""Maximum bytes of the workspace of the CUDA kernels, unless one layer of the longest request needs
more. Longer requests run some layers at a time."""

SMALL_BYTES = 2**20
SMALL_COUNT = 32
"""torch serves allocations of up to 1 MiB from segments of 2 MiB of their own, and 32 MiB of these
hold the tables of evictions."""


@dataclass(frozen=True)
class EvictionSizes:
    """Sizes on which the workspace of an eviction depends.

    Args:
        layers: Evictable layers on this rank.
        heads: KV heads on this rank.
        query_rows: Query heads of a KV head, times the window; 0 if no policy reads queries.
        head_size: D.
        block_size: Tokens in a page.
        slot_bytes: Bytes of a cached token of a head: key, value, and scales if any.
        made: Floats that a policy computes once for each token and keeps with it.

    """

    layers: int
    heads: int
    query_rows: int
    head_size: int
    block_size: int
    slot_bytes: int
    made: int = 0

    def kernel_bytes(self, layers: int, tokens: int) -> int:
        """Return the maximum bytes of workspace of a launch of the CUDA kernels.

        The staging buffer of survivors reuses the memory of the scores, which are no longer needed
        when tokens move.

        Args:
            layers: Layers of the launch.
            tokens: Tokens of the longest request, times the number of requests.

        """
        groups = blocks_for(self.query_rows, min(map(rows_at_once, HEAD_SIZES)))
        scores_and_sort = 4 * groups + 4 + 2 * 4 + blocks_for(8, self.block_size)
        kept_columns = 4
        lse = 4 * self.query_rows * (1 + 2 * blocks_for(tokens, CHUNK))
        # A norm for each candidate, a sum for each token and a mean for each head.
        norms = (self.made > 0) * 4 * layers * (tokens * (self.heads + 1) + self.heads)
        scoring = layers * self.heads * (tokens * scores_and_sort + lse) + norms
        moving = max(STAGING_BYTES, self.heads * tokens * self.slot_bytes)
        kept = layers * self.heads * tokens * (kept_columns + self.made * 4)
        return kept + max(scoring, moving)

    def kernel_workspace(self, longest: int) -> int:
        """Return the bytes of workspace with which the kernels evict requests of ``longest``
        tokens."""
        # One layer needs a long staging buffer. With a quarter more, the scores of many layers fit.
        least = self.kernel_bytes(1, longest) * 5 // 4
        return min(self.kernel_bytes(self.layers, longest), max(KERNEL_BYTES, least))

    def layers_at_once(self, tokens: int, num_bytes: int) -> int:
        """Return the number of layers that run at once in a workspace; at least 1.

        Args:
            tokens: Tokens of the longest request, times the number of requests.
            num_bytes: Bytes of the workspace.

        """
        fitting = (
            n for n in range(self.layers, 1, -1) if self.kernel_bytes(n, tokens) <= num_bytes
        )
        return next(fitting, 1)

    def tokens_at_once(self, longest: int, num_bytes: int) -> int:
        """Return the number of tokens, at most ``longest``, of which all layers run at once."""
        low, high = 1, longest
        while low < high:
            middle = (low + high + 1) // 2
            if self.kernel_bytes(self.layers, middle) <= num_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def pytorch_workspace(self, longest: int, mixes_heads: bool) -> int:
        """Return the bytes of workspace of an eviction by PyTorch operations.

        Intermediate results of :func:`~vllm_kvevict.ops.torch.score.logits_at_once` numbers exist
        up to :data:`~vllm_kvevict.ops.pieces.RESULTS` times. Each candidate column takes 64 bytes:
        its scores, floats and ranks.

        Args:
            longest: Tokens of the longest request.
            mixes_heads: True if a policy scores one layer at a time, with all its keys in memory.

        """
        all_columns = self.layers * self.heads * longest
        columns = min(all_columns, max(pieces.COLUMNS, self.heads * longest))
        width = max(score.MIN_ROWS, self.head_size, self.query_rows * mixes_heads)
        numbers = max(score.DEVICE_LOGITS, longest * width)
        numbers = min(numbers, all_columns * max(self.query_rows, self.head_size))
        queries = 4 * self.layers * self.heads * self.query_rows * self.head_size
        keys = mixes_heads * 4 * self.heads * longest * self.head_size
        return pieces.RESULTS * 4 * numbers + 64 * columns + 2 * queries + keys


class Workspace:
    """A pool of memory from which evictions allocate.

    Allocations inside :meth:`use` never reach the CUDA driver, which may stall the device for
    milliseconds, as long as they fit. What they free stays in the pool. Until :meth:`open` the
    memory counts as allocated, so that vLLM's profile of the memory contains it.

    Args:
        num_bytes: Bytes to allocate.
        device: Device of the cache. On other devices than CUDA devices nothing is allocated.

    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._pool: torch.cuda.MemPool | None = None
        self._stream: torch.cuda.Stream | None = None
        self._held: list[torch.Tensor] = []
        self.extend(num_bytes)

    def extend(self, num_bytes: int) -> None:
        """Allocate memory in which ``num_bytes`` bytes fit, if the pool has less."""
        if num_bytes <= self.num_bytes:
            return
        small = 0 if self.num_bytes else SMALL_COUNT
        self.num_bytes = num_bytes
        if self._device.type == "cuda":
            self._allocate([num_bytes, *[SMALL_BYTES] * small])

    def open(self) -> None:
        """Give the memory to evictions."""
        self._held.clear()

    def release(self) -> None:
        """Free the memory, for as long as the engine sleeps."""
        self._held.clear()
        self._pool = None

    def renew(self) -> None:
        """Allocate the memory again after :meth:`release`."""
        if self._device.type == "cuda" and self._pool is None:
            self._allocate([self.num_bytes, *[SMALL_BYTES] * SMALL_COUNT])
            self.open()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Allocate from the pool."""
        if self._pool is None:
            yield
            return
        if torch.cuda.current_stream(self._device) != self._stream:
            # torch reuses memory on the stream for which it was allocated.
            self._pool = None
            self._allocate([self.num_bytes, *[SMALL_BYTES] * SMALL_COUNT])
            self.open()
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def _allocate(self, sizes: list[int]) -> None:
        if self._pool is None:
            self._held.clear()
            self._pool = torch.cuda.MemPool()
            self._stream = torch.cuda.current_stream(self._device)
        with torch.cuda.use_mem_pool(self._pool, self._device):
            self._held += [
                torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes
            ]


def eviction_sizes(
    config: "EvictionConfig", spec: "EvictableAttentionSpec", layers: int, query_heads: int
) -> EvictionSizes:
    """Return the sizes of one rank.

    Args:
        config: The settings of eviction.
        spec: Spec of an evictable layer.
        layers: Evictable layers on this rank.
        query_heads: Query heads of a layer on this rank.

    """
    reads = any(needs.window != "none" for needs in policy_requirements(config).values())
    return EvictionSizes(
        layers=layers,
        heads=spec.num_kv_heads,
        query_rows=query_heads // spec.num_kv_heads * config.window * reads,
        head_size=spec.head_size,
        block_size=spec.block_size,
        slot_bytes=spec.page_size_bytes // (spec.num_kv_heads * spec.block_size),
        made=floats_per_token(config),
    )


def pytorch_bytes(config: "EvictionConfig", sizes: EvictionSizes, longest: int) -> int:
    """Return the bytes of workspace with which PyTorch operations evict ``longest`` tokens."""
    mixes_heads = any(not needs.heads_alone for needs in policy_requirements(config).values())
    return sizes.pytorch_workspace(longest, mixes_heads)


def workspace_bytes(
    config: "EvictionConfig", sizes: EvictionSizes, longest: int, kernels: bool
) -> int:
    """Return the bytes of workspace of a server.

    Args:
        config: The settings of eviction.
        sizes: The sizes of one rank.
        longest: Tokens of the longest request.
        kernels: True if the CUDA kernels run for the policies that they compute.

    """
    policies = build_policies(config).values()
    served = [kernels and has_kernels(policy.scorer) for policy in policies]
    needed = [sizes.kernel_workspace(longest)] if any(served) else []
    if not all(served):
        needed.append(pytorch_bytes(config, sizes, longest))
    return max(needed)

"""Pieces of an eviction by PyTorch operations: the heads that are taken at once.

Launches cost a GPU more than the work of one layer, and memory bounds what it can take at once. On
a CPU this holds for what its caches keep, and larger layers are taken one at a time.
Heads are numbered layer by layer: head h of layer l is ``l * H + h``.
"""

from collections.abc import Hashable, Iterator, Sequence

import torch

from vllm_kvevict.ops.torch.buffers import by_dimension
from vllm_kvevict.ops.torch.score import logits_at_once

FLOATS = 2**18
"""Maximum number of float32 numbers of an operation on a CPU, 1 MiB, unless one layer has more. The
caches of a CPU hold them, and fewer take longer to start than to compute."""

COLUMNS = 2**21
"""Maximum number of candidate columns of all heads of the layers that a GPU takes at once, unless
one layer has more."""

RESULTS = 7
"""Maximum number of float32 results of the size of :func:`heads_at_once` that exist at once."""


def layers_at_once(device: torch.device, num_layers: int, num_heads: int, num_tokens: int) -> int:
    """Return the number of layers whose candidates are in memory at once.

    The result is the same on all tensor-parallel ranks, which take part in sums together.

    Args:
        device: Device of the cache.
        num_layers: L.
        num_heads: H.
        num_tokens: Tokens of the request, at least as many as any head holds.

    """
    if device.type == "cpu":
        return num_layers
    return min(num_layers, max(1, COLUMNS // (num_heads * num_tokens)))


def heads_at_once(device: torch.device, num_heads: int, elements: int) -> int:
    """Return the number of heads that operations take at once: whole layers, or parts of one.

    Args:
        device: Device of the cache.
        num_heads: H.
        elements: float32 numbers of the largest intermediate result of a head.

    """
    if device.type == "cpu":
        return num_heads * max(1, FLOATS // max(1, num_heads * elements))
    count = max(1, logits_at_once(device) // max(1, elements))
    return count if count < num_heads else count // num_heads * num_heads


def tokens_at_once(device: torch.device, elements: int) -> int:
    """Return the number of tokens that operations take at once, at least one.

    Args:
        device: Device of the cache.
        elements: float32 numbers of the largest intermediate result of a token.

    """
    return max(1, logits_at_once(device) // elements)


def width_in_place(size: int, itemsize: int) -> int:
    """Return how many float32 numbers a head needs per column if its scorer reads keys in place.

    The keys are then in memory twice, by layers and of all heads together.

    Args:
        size: D.
        itemsize: Bytes of an element of the keys.

    """
    return -(-2 * itemsize * size // (4 * RESULTS))


def head_blocks(kinds: Sequence[Hashable], num_heads: int, at_once: int) -> Iterator[slice]:
    """Yield blocks of at most ``at_once`` heads, in order.

    Args:
        kinds: Kind of each layer. All heads of a block are of the same kind.
        num_heads: H.
        at_once: Maximum number of heads of a block.

    Yields:
        Slices of the L * H heads.

    """
    begin, total = 0, len(kinds) * num_heads
    while begin < total:
        layer = begin // num_heads
        same = layer + 1
        while same < len(kinds) and kinds[same] == kinds[layer]:
            same += 1
        end = min(same * num_heads, begin + at_once)
        if at_once < num_heads:
            # The rest of a layer is a block of its own, so that no block reads two layers.
            end = min(end, (layer + 1) * num_heads)
        yield slice(begin, end)
        begin = end


def by_layer(heads: slice, num_heads: int) -> Iterator[tuple[int, slice]]:
    """Yield the layers of a block of heads, with the heads of each layer, numbered from 0."""
    for layer in range(heads.start // num_heads, -(-heads.stop // num_heads)):
        first = layer * num_heads
        yield layer, slice(max(0, heads.start - first), min(num_heads, heads.stop - first))


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the concatenation of parts along the first dimension; a single part is not copied.

    Parts [H, N, D] that lie by dimension are joined to a tensor that does so as well.
    """
    if len(parts) == 1:
        return parts[0]
    if parts[0].ndim == 3 and by_dimension(parts[0]):
        return torch.cat([part.mT for part in parts]).mT
    return torch.cat(list(parts))

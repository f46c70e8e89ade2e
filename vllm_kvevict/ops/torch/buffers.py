"""Memory for intermediate results of an eviction on a CPU."""

import math
from collections.abc import Sequence

import torch


class Buffers:
    """Memory that the layers of an eviction use one after another.

    On a CPU, results of this size are often returned to the operating system when they are freed.
    The page faults of the next layer then take longer than its matrix products. On other devices
    PyTorch keeps memory, so nothing is kept here.
    """

    def __init__(self) -> None:
        self._flat: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return uninitialized float32 memory, valid until the name is taken again."""
        if device.type != "cpu":
            return torch.empty(tuple(shape), dtype=torch.float32, device=device)
        size, flat = math.prod(shape), self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = torch.empty(size, dtype=torch.float32, device=device)
        return flat[:size].view(*shape)

    def like(self, name: str, keys: torch.Tensor) -> torch.Tensor:
        """Return memory for keys [H, N, D] that lie by dimension, or by token, as these do."""
        heads, tokens, size = keys.shape
        if by_dimension(keys):
            return self.take(name, (heads, size, tokens), keys.device).mT
        return self.take(name, keys.shape, keys.device)

    def floats(self, name: str, keys: torch.Tensor) -> torch.Tensor:
        """Return keys [H, N, D] in float32: themselves, or a copy in this memory."""
        return keys if keys.dtype == torch.float32 else self.like(name, keys).copy_(keys)

    def clear(self) -> None:
        """Free the memory."""
        self._flat.clear()


def by_dimension(keys: torch.Tensor) -> bool:
    """Return True if keys [H, N, D] are stored dimension by dimension, as on CPUs."""
    return keys.stride(-2) < keys.stride(-1)

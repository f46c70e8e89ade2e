"""A rotary module whose keys are complex numbers, in the place of vLLM's."""

from collections.abc import Iterator

import torch


class Turned:
    """Turns pairs of dimensions by angles of its own, and scales them, as YaRN does.

    Args:
        head_size: D.
        dims: Dimensions that are turned.
        neox: Whether pairs are (i, i + dims / 2), else (2i, 2i + 1).
        base: The larger, the slower.
        device: Of the table of cosines and sines.

    """

    def __init__(
        self, head_size: int, dims: int, neox: bool, base: float, device: torch.device
    ) -> None:
        self.head_size, self.rotary_dim, self.is_neox_style = head_size, dims, neox
        speed = base ** -(torch.arange(dims // 2) / (dims // 2))
        angles = torch.arange(512)[:, None] * speed
        self.cos_sin_cache = 1.25 * torch.cat([angles.cos(), angles.sin()], -1).to(device)

    def buffers(self) -> Iterator[torch.Tensor]:
        yield self.cos_sin_cache

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries as they are, and keys [N, D] turned by their positions [N]."""
        pairs = self.rotary_dim // 2
        mine = self.cos_sin_cache.index_select(0, positions)
        first = slice(0, pairs) if self.is_neox_style else slice(0, 2 * pairs, 2)
        second = slice(pairs, 2 * pairs) if self.is_neox_style else slice(1, 2 * pairs, 2)
        pointers = torch.complex(mine[:, :pairs], mine[:, pairs:])
        turned = torch.complex(keys[:, first].contiguous(), keys[:, second].contiguous()) * pointers
        keys = keys.clone()
        keys[:, first], keys[:, second] = turned.real, turned.imag
        return query, keys

    forward = forward_native

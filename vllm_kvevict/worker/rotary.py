"""The rotary module of a layer's keys, and the inverse of its rotation."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vllm_kvevict.ops.torch.probe import Rotation, unrotated

NAME = "rotary_emb"
"""Attribute of a rotary module in vLLM's models. If it is None, keys are not rotated."""

SWITCHES = ("use_rope", "_use_rope")
"""Attributes of an attention module that are False if it does not call its rotary module."""


@dataclass(frozen=True)
class Rotary:
    """A rotary module of vLLM, which rotates pairs of a key's dimensions by the token's position.

    The angles are read from the module's own output, so any base, scaling and sections work.

    Args:
        module: The module.
        first: Dimensions of a cached key before those that the module rotates; above 0 for the
            entries of a latent cache.

    """

    module: Any
    first: int = 0

    @property
    def interleaved(self) -> bool:
        return not getattr(self.module, "is_neox_style", True)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Return the inverse rotation at some positions.

        Args:
            positions: [N] int64, or [3, N] if the module has sections (M-RoPE).

        """
        return replace(self._rotation(positions), first=self.first)

    def _rotation(self, positions: torch.Tensor) -> Rotation:
        """Return the inverse rotation of the dimensions that the module gets."""
        pairs = self.module.rotary_dim // 2
        first, second = (0, 1) if self.interleaved else (0, pairs)
        step = 2 if self.interleaved else 1
        # Rotating (1, 0) gives the cosine in a pair's first dimension and the sine in its second.
        upright = torch.zeros(
            positions.shape[-1], self.module.head_size, dtype=self.dtype, device=positions.device
        )
        upright[:, first : first + step * pairs : step] = 1
        rotated = self.rotated(positions, upright).float()
        cos = rotated[:, first : first + step * pairs : step]
        sin = rotated[:, second : second + step * pairs : step]
        lengths = cos.square() + sin.square()
        return Rotation(cos / lengths, sin / lengths, self.interleaved)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the module's table. For any other dtype the module converts its table."""
        tables = (table.dtype for table in self.module.buffers() if table.is_floating_point())
        return next(tables, torch.float32)

    def table(self, longest: int) -> torch.Tensor | None:
        """Return the module's table of cosines, then sines: [positions, rotated dimensions].

        Args:
            longest: Longest sequence in tokens.

        Returns:
            None if the module has no such table, rotates keys that begin after other dimensions, or
            rotates by more than the token's index (M-RoPE).

        """
        table = getattr(self.module, "cos_sin_cache", None)
        sections = (getattr(self.module, f"{name}_section", None) for name in ("mrope", "xdrope"))
        if self.first or any(section is not None for section in sections):
            return None
        if not isinstance(table, torch.Tensor):
            return None
        if table.shape[1:] != (self.module.rotary_dim,) or len(table) < longest:
            return None
        positions = torch.tensor([0, 1, longest // 3, longest - 1], device=table.device)
        rotation, entries = self.rotation(positions), table[positions].float()
        cos, sin = entries.chunk(2, dim=-1)
        lengths = cos.square() + sin.square()
        matches = torch.equal(cos / lengths, rotation.cos) and torch.equal(
            sin / lengths, rotation.sin
        )
        return table.contiguous() if matches else None

    def is_exact(self, longest: int, device: torch.device) -> bool:
        """Return True if :meth:`rotation` inverts the module, up to rounding.

        Args:
            longest: Longest sequence in tokens.
            device: Device of the module.

        """
        positions = torch.tensor([0, 1, longest // 3, longest - 1], device=device)
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(4, self.module.head_size, generator=generator).to(device, self.dtype)
        rotated = self.rotated(positions, keys.clone())
        inverted = unrotated(rotated[None], self._rotation(positions))[0]
        tolerance = 16 * torch.finfo(self.dtype).eps
        return torch.allclose(inverted, keys.float(), rtol=tolerance, atol=tolerance)

    def rotated(self, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the keys [N, D] that the module gets, or [N, H * D], at positions [N]."""
        # PyTorch on every platform, because a kernel may need more than one row, or a query head.
        apply = getattr(self.module, "forward_native", self.module.forward)
        # Latent attention passes a dimension of heads to its modules, and some need it.
        given = keys[:, None] if self.first else keys
        return apply(positions, given.clone(), given.clone())[1].view(keys.shape)


def find(model: nn.Module, layer: nn.Module) -> Rotary | None:
    """Return the rotary module of an attention layer: the child of its nearest ancestor.

    Args:
        model: The model.
        layer: One of its attention layers.

    Returns:
        None if keys are not rotated (NoPE).

    Raises:
        ValueError: The model has rotary embeddings, but none among the children of this layer's
            ancestors.

    """
    path = next(name for name, module in model.named_modules() if module is layer)
    while path:
        path = path.rpartition(".")[0]
        above = model.get_submodule(path)
        if any(getattr(above, switch, None) is False for switch in SWITCHES):
            return None
        if hasattr(above, NAME) and getattr(above, NAME) is None:
            return None
        children = dict(above.named_children())
        named = [children[NAME]] if NAME in children else []
        for child in [*named, *children.values()]:
            if _is_rotary(child):
                return Rotary(child, getattr(layer, "kv_lora_rank", 0))
    if any("Rotary" in type(module).__name__ for module in model.modules()):
        raise ValueError("its rotary embedding is in no module that contains its attention")
    return None


def _is_rotary(module: nn.Module) -> bool:
    return hasattr(module, "rotary_dim") and hasattr(module, "head_size")

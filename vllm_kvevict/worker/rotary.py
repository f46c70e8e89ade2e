"""The rotation of a layer's keys, found beside its attention and taken out by the module itself."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vllm_kvevict.ops.torch.probe import Rotation, unrotated

NAME = "rotary_emb"
"""What vLLM's models call a rotary module; where it is None, keys are not rotated."""

SWITCHES = ("use_rope", "_use_rope")
"""Attributes of an attention that say whether it calls its rotary module."""


@dataclass(frozen=True)
class Rotary:
    """A rotary module of vLLM, which turns pairs of a key's dimensions by the token's position.

    Its own code says by how much: whatever the base, the scaling and the sections are.

    Args:
        module: The module.
        first: Dimensions of a cached key before those that the module gets, as an entry of a
            latent cache has them.

    """

    module: Any
    first: int = 0

    @property
    def interleaved(self) -> bool:
        return not getattr(self.module, "is_neox_style", True)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """What takes the rotation out at some positions.

        Args:
            positions: [N] int64, or [3, N] where the module has sections (M-RoPE).

        """
        return replace(self._rotation(positions), first=self.first)

    def _rotation(self, positions: torch.Tensor) -> Rotation:
        """What takes it out of the dimensions that the module gets."""
        pairs = self.module.rotary_dim // 2
        first, second = (0, 1) if self.interleaved else (0, pairs)
        step = 2 if self.interleaved else 1
        # The first dimension of every pair turns into its cosine, the second into its sine.
        upright = torch.zeros(
            positions.shape[-1], self.module.head_size, dtype=self.dtype, device=positions.device
        )
        upright[:, first : first + step * pairs : step] = 1
        turned = self._apply(positions, upright).float()
        cos = turned[:, first : first + step * pairs : step]
        sin = turned[:, second : second + step * pairs : step]
        lengths = cos.square() + sin.square()
        return Rotation(cos / lengths, sin / lengths, self.interleaved)

    @property
    def dtype(self) -> torch.dtype:
        """That of the module's table: another one would make the module convert it in place."""
        tables = (table.dtype for table in self.module.buffers() if table.is_floating_point())
        return next(tables, torch.float32)

    def table(self, longest: int) -> torch.Tensor | None:
        """Cosines, then sines, by position [positions, rotated dimensions], as the module has them.

        Args:
            longest: Longest sequence in tokens.

        Returns:
            None where the module has no such table, turns a part of keys behind another, or turns
            keys by more than their token's number (M-RoPE): only its own code says what it does.

        """
        found = getattr(self.module, "cos_sin_cache", None)
        sections = (getattr(self.module, f"{name}_section", None) for name in ("mrope", "xdrope"))
        turned = self.first or any(one is not None for one in sections)
        if not isinstance(found, torch.Tensor) or turned:
            return None
        if found.shape[1:] != (self.module.rotary_dim,) or len(found) < longest:
            return None
        positions = torch.tensor([0, 1, longest // 3, longest - 1], device=found.device)
        rotation, mine = self.rotation(positions), found[positions].float()
        cos, sin = mine.chunk(2, dim=-1)
        lengths = cos.square() + sin.square()
        known = torch.equal(cos / lengths, rotation.cos) and torch.equal(
            sin / lengths, rotation.sin
        )
        return found.contiguous() if known else None

    def is_exact(self, longest: int, device: torch.device) -> bool:
        """Whether :meth:`rotation` takes out what the module does, up to rounding.

        Args:
            longest: Longest sequence in tokens.
            device: The module's.

        """
        positions = torch.tensor([0, 1, longest // 3, longest - 1], device=device)
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(4, self.module.head_size, generator=generator).to(device, self.dtype)
        turned = self._apply(positions, keys.clone())
        found = unrotated(turned[None], self._rotation(positions))[0]
        tolerance = 16 * torch.finfo(self.dtype).eps
        return torch.allclose(found, keys.float(), rtol=tolerance, atol=tolerance)

    def _apply(self, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        # In PyTorch on every platform: a kernel may want more than one row, or a query head.
        apply = getattr(self.module, "forward_native", self.module.forward)
        # Latent attention gives its modules a dimension of heads, and some need it.
        given = keys[:, None] if self.first else keys
        return apply(positions, given.clone(), given.clone())[1].view(keys.shape)


def find(model: nn.Module, layer: nn.Module) -> Rotary | None:
    """The rotary module of an attention layer: the nearest one beside it or above it.

    Args:
        model: The whole model.
        layer: One of its attention layers.

    Returns:
        None where keys are not rotated (NoPE).

    Raises:
        ValueError: The model has rotary embeddings somewhere, and none is near this layer.

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
        raise ValueError("its rotary embedding is not near its attention")
    return None


def _is_rotary(module: nn.Module) -> bool:
    return hasattr(module, "rotary_dim") and hasattr(module, "head_size")

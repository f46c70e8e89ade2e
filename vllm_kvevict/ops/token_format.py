"""The format of a stored token: the one place that knows it.

A page of a store has the bytes of a page of vLLM's cache, ``block_size`` tokens of one head in the
cache's type. How many tokens a store's page holds, how many bytes each takes, and how keys and
values become these bytes, is defined here. The arithmetic of budgets (through ``page_tokens`` of
:class:`~vllm_kvevict.rules.rule.EvictionRule`), the cache, stores in memory and files, and
``vllm-kvevict plan`` ask a :class:`TokenFormat`.

The format of a server is :attr:`~vllm_kvevict.config.config.EvictionConfig.token_format`, by the
flag ``--kv-eviction-store-dtype``. This module imports torch only when tokens are encoded, so that
configurations are read without it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class TokenFormat:
    """Stored tokens as vLLM wrote them: in the type of the cache, FP8 with one scale per layer
    included.

    Its tokens are moved as they are, so it has neither planes nor an encoding. A subclass states
    another format. Its pages consist of planes: the first bytes of all tokens of the page, token by
    token, then the second bytes of all tokens, and so on.
    """

    @property
    def name(self) -> str:
        """Name in the fingerprint of files."""
        return "cache"

    as_cached: ClassVar[bool] = True
    """True if a store's page has the layout of all other pages, which vLLM's kernels read. A token
    is then moved as it is."""

    def page_tokens(self, block_size: int) -> int:
        """Return the tokens in a page of a store, at least ``block_size``.

        Args:
            block_size: Tokens in a page of vLLM's cache, which has the same bytes.

        """
        return block_size

    def planes(self, head_size: int) -> "tuple[int, ...]":
        """Return the bytes that a token has in each plane of a page.

        Args:
            head_size: Elements of its key, and of its value.

        """
        raise NotImplementedError

    def page_bytes(self, block_size: int, num_elements: int, itemsize: int) -> int:
        """Return the bytes of a page, of a store or not.

        Args:
            block_size: Tokens in a page of vLLM's cache.
            num_elements: Elements of the key and the value of a token.
            itemsize: Bytes of an element of vLLM's cache.

        Raises:
            ValueError: The tokens of a store's page do not fit into it.

        """
        size = block_size * num_elements * itemsize
        if not self.as_cached:
            token = sum(self.planes(num_elements // 2))
            if self.page_tokens(block_size) * token > size:
                raise ValueError(
                    f"pages of {block_size} tokens with {num_elements} elements of {itemsize} "
                    f"bytes do not hold {self.page_tokens(block_size)} tokens of {self.name}"
                )
        return size

    def encode(self, keys: "torch.Tensor", values: "torch.Tensor") -> "list[torch.Tensor]":
        """Return tokens as they are stored.

        Args:
            keys: [..., D] of a floating-point type, the scale of an FP8 cache applied.
            values: [..., D], likewise.

        Returns:
            [..., bytes] uint8 for each of :meth:`planes`.

        """
        raise NotImplementedError

    def decode(self, planes: "Sequence[torch.Tensor]") -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the keys and values [..., D] float32 of stored tokens.

        Args:
            planes: [..., bytes] uint8 for each of :meth:`planes`.

        """
        raise NotImplementedError

    def turned(self, planes: "Sequence[torch.Tensor]") -> "tuple[torch.Tensor, torch.Tensor]":
        """Return what :meth:`decode` returns, times the transpose of :meth:`rotation`.

        Attention over rotated keys with a rotated query has the same weights, so that a query and
        an output are rotated instead of every token.
        """
        return self.decode(planes)

    def rotation(self, head_size: int, device: "torch.device") -> "torch.Tensor | None":
        """Return the orthogonal matrix [D, D] float32 by which stored vectors are rotated, as
        ``x @ rotation.T``; None for none."""
        return None


@dataclass(frozen=True)
class PackedFormat(TokenFormat):
    """Tokens of rotated keys and values in few bits.

    Keys and values are rotated by a Hadamard matrix with random signs, which spreads single large
    elements over all dimensions. Each group of :data:`GROUP` dimensions has one 16-bit scale and
    evenly spaced levels around 0. The levels are those of the scale of :data:`CLIPS` with the least
    squared error; the scale is then fitted to them (:func:`fitted`). If a key and a value take one
    byte for each dimension together, a page has one plane of them, ``key << value_bits | value``,
    else a plane of keys and one of values. The scales, keys before values, are the last plane.

    Keys are encoded without the centre of their head, which callers subtract and add
    (:mod:`vllm_kvevict.worker.centres`).

    A NaN or an infinite element makes its own token NaN, and no other.

    Args:
        key_bits: Bits of an element of a key.
        value_bits: Bits of an element of a value.
        sixteenths: Tokens of a store's page for every 16 tokens of another page.

    """

    key_bits: int
    value_bits: int
    sixteenths: int
    as_cached: ClassVar[bool] = False

    def page_tokens(self, block_size: int) -> int:
        return block_size * self.sixteenths // 16

    def planes(self, head_size: int) -> tuple[int, ...]:
        codes = (head_size,) if self._joint else (head_size, head_size)
        return *codes, 2 * 2 * groups(head_size)

    @property
    def name(self) -> str:
        """Name in the fingerprint of files, with all that decides about the bytes."""
        return (
            f"{self.key_bits}/{self.value_bits} bits, {self.sixteenths}/16, "
            f"signs {signs_digest()}, centres of {POSITIONS}"
        )

    @property
    def _joint(self) -> bool:
        return self.key_bits + self.value_bits <= 8

    def encode(self, keys: "torch.Tensor", values: "torch.Tensor") -> "list[torch.Tensor]":
        import torch

        codes, scales = [], []
        parts = (keys, self.key_bits, False), (values, self.value_bits, True)
        for elements, bits, of_values in parts:
            rotation = self.rotation(elements.shape[-1], elements.device)
            rotated = elements.float() @ rotation.T
            found, scale = quantise(rotated, bits)
            codes.append(found)
            scales.append(fitted(rotated, found, scale, bits, of_values))
        if self._joint:
            codes = [codes[0] << self.value_bits | codes[1]]
        return [*codes, torch.cat(scales, dim=-1).contiguous().view(torch.uint8)]

    def turned(self, planes: "Sequence[torch.Tensor]") -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

        *codes, packed = planes
        scales = packed.contiguous().view(torch.float16).float().chunk(2, dim=-1)
        if self._joint:
            mask = (1 << self.value_bits) - 1
            codes = [codes[0] >> self.value_bits, codes[0] & mask]
        keys, values = (
            dequantise(of, scale, bits)
            for of, scale, bits in zip(codes, scales, (self.key_bits, self.value_bits), strict=True)
        )
        return keys, values

    def decode(self, planes: "Sequence[torch.Tensor]") -> "tuple[torch.Tensor, torch.Tensor]":
        keys, values = self.turned(planes)
        rotation = self.rotation(keys.shape[-1], keys.device)
        return keys @ rotation, values @ rotation

    def rotation(self, head_size: int, device: "torch.device") -> "torch.Tensor":
        return hadamard(head_size, device)


POSITIONS = 4096
"""Positions over which a rotated bias is averaged. With more of them, less would be subtracted from
the keys of short prompts; with fewer, what is left at later positions is at most twice as large."""

GROUP = 64
"""Largest number of dimensions with a scale of their own."""

CLIPS = (1.0, 0.93, 0.86, 0.79, 0.72, 0.65)
"""Largest levels that are tried, as factors of the largest element of a group."""

SIGNS_SEED = 7
"""Seed of the signs of the rotation. Another one is another format."""


def groups(head_size: int) -> int:
    """Return the number of groups of dimensions of a head, each with a scale of its own."""
    return head_size // GROUP if head_size % GROUP == 0 else 1


def quantise(rotated: "torch.Tensor", bits: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the levels [..., D] uint8 of vectors [..., D] float32, and the scales of their groups,
    [..., groups] float16."""
    import torch

    parts = rotated.unflatten(-1, (groups(rotated.shape[-1]), -1))
    middle = (2**bits - 1) / 2
    largest = parts.abs().amax(-1, keepdim=True)
    # Numbers of the host, because a tensor of them would be an upload for which the host waits.
    factors = (torch.tensor(CLIPS, device="cpu") / middle).tolist()
    # Rounded as they are stored. The least scale keeps a group of zeros from a division by 0.
    scales = torch.cat([largest * factor for factor in factors], dim=-1)
    scales = scales.half().float().clamp_min_(2.0**-24)
    if rotated.is_cpu:
        from vllm_kvevict.ops.cpu.levels import quantise as compiled

        # Levels of NaN do not matter: the scale makes their token NaN.
        finite = parts.nan_to_num(0.0, 0.0, 0.0).flatten(0, -2)
        levels, scale = compiled(finite, scales.flatten(0, -2), bits)
        return levels.view(rotated.shape), scale.view(parts.shape[:-1]).half()

    def tried(index: int) -> "tuple[torch.Tensor, torch.Tensor]":
        scale = scales[..., index : index + 1]
        # In place, because memory for evictions is counted in results of this size.
        levels = (parts / scale).add_(middle).round_().clamp_(0, 2 * middle)
        off = (levels - middle).mul_(scale).sub_(parts)
        return levels, off.square_().sum(-1, keepdim=True)

    (levels, least), chosen = tried(0), torch.zeros_like(largest, dtype=torch.int64)
    for index in range(1, len(CLIPS)):
        others, error = tried(index)
        better = error < least
        levels, least = torch.where(better, others, levels), torch.where(better, error, least)
        chosen.masked_fill_(better, index)
    scale = scales.gather(-1, chosen)
    return levels.nan_to_num_(0.0).to(torch.uint8).flatten(-2), scale[..., 0].half()


def fitted(
    rotated: "torch.Tensor", levels: "torch.Tensor", scales: "torch.Tensor", bits: int, values: bool
) -> "torch.Tensor":
    """Return scales [..., groups] float16 that fit the levels of vectors.

    Keys get the scale with the least squared error. That scale makes vectors shorter, which a
    weighted sum of values does not average out, so values get the scale at which the product of a
    vector and its stored form is that of the vector with itself.

    Args:
        rotated: [..., D] float32 vectors.
        levels: [..., D] uint8.
        scales: [..., groups] float16 with which the levels were chosen.
        bits: Bits of a level.
        values: Whether the vectors are values.

    """
    import torch

    parts = rotated.unflatten(-1, (scales.shape[-1], -1))
    found = levels.float().sub_((2**bits - 1) / 2).unflatten(-1, (scales.shape[-1], -1))
    common = (parts * found).sum(-1)
    if values:
        # A group of zeros has no such scale.
        scale = torch.where(common > 0, parts.square().sum(-1) / common, scales.float())
    else:
        scale = common / found.square().sum(-1)
    return scale.clamp_(min=2.0**-24).half()


def dequantise(levels: "torch.Tensor", scales: "torch.Tensor", bits: int) -> "torch.Tensor":
    """Return the vectors [..., D] float32 of levels [..., D] uint8 with scales [..., groups]."""
    middle = (2**bits - 1) / 2
    parts = levels.float().sub_(middle).unflatten(-1, (scales.shape[-1], -1))
    return parts.mul_(scales[..., None]).flatten(-2)


def signs(size: int) -> "torch.Tensor":
    """Return the signs [size] int64, 1 or -1, of the dimensions in the rotation. On the CPU."""
    import torch

    generator = torch.Generator().manual_seed(SIGNS_SEED)
    return torch.randint(0, 2, (size,), generator=generator, device="cpu") * 2 - 1


def signs_digest() -> str:
    """Return 12 hexadecimal digits that differ if the signs of a head size from which stores in few
    bits are served differ: a seed alone leaves them to torch's generator."""
    from hashlib import sha256

    every = [signs(size).tolist() for size in range(64, 257, 8)]
    return sha256(str(every).encode()).hexdigest()[:12]


_rotations: "dict[tuple[int, torch.device], torch.Tensor]" = {}


def hadamard(size: int, device: "torch.device") -> "torch.Tensor":
    """Return an orthogonal matrix [size, size] float32: Hadamard matrices of the largest power of
    two that divides ``size``, along the diagonal, with random signs of its columns.
    """
    import torch

    if (size, device) not in _rotations:
        block = size & -size
        matrix = torch.ones(1, 1, device="cpu")
        while len(matrix) < block:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        whole = torch.block_diag(*[matrix] * (size // block)) / block**0.5
        _rotations[size, device] = (whole * signs(size)).to(device)
    return _rotations[size, device]


AS_CACHED = TokenFormat()
INT4 = PackedFormat(5, 3, 60)
INT8 = PackedFormat(8, 8, 30)
INT4_FP8 = PackedFormat(5, 3, 30)
"""The same for an FP8 cache. Its pages have half the bytes, and hold half as many tokens."""

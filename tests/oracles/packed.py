"""What stores in few bits give back, with numpy and by the definition of the format."""

import numpy as np
import torch

CLIPS = (1.0, 0.93, 0.86, 0.79, 0.72, 0.65)

BITS = dict(int4=(5, 3), int8=(8, 8))
"""Bits of keys and of values by ``--kv-eviction-store-dtype``."""


def rotation(size: int) -> np.ndarray:
    """A Hadamard matrix by parities, with the signs of torch's generator with the seed 7."""
    parity = [[bin(i & j).count("1") % 2 for j in range(size)] for i in range(size)]
    generator = torch.Generator().manual_seed(7)
    signs = torch.randint(0, 2, (size,), generator=generator).numpy() * 2 - 1
    return ((1 - 2 * np.array(parity)) * signs / np.sqrt(size)).astype(np.float32)


def given_back(vectors: torch.Tensor, bits: int, values: bool = False) -> torch.Tensor:
    """Keys or values [..., D] float32 after they were stored in ``bits`` bits and read."""
    size = vectors.shape[-1]
    turned = vectors.float().numpy().reshape(-1, size) @ rotation(size).T
    groups = turned.reshape(len(turned), -1, min(64, size))
    middle = np.float32((2**bits - 1) / 2)
    largest = np.abs(groups).max(-1, keepdims=True)
    tried = []
    for clip in CLIPS:
        scale = (largest * np.float32(clip / middle)).astype(np.float16).astype(np.float32)
        scale = np.maximum(scale, np.float32(2**-24))
        near = np.clip(np.round(groups / scale + middle), 0, 2 * middle) - middle
        tried.append((near, near * scale))
    errors = np.stack([((one - groups) ** 2).sum(-1) for _, one in tried])
    levels = np.stack([near for near, _ in tried])
    levels = np.take_along_axis(levels, errors.argmin(0)[None, ..., None], 0)[0]
    common = (groups * levels).sum(-1, keepdims=True)
    if values:
        # The product with the vector itself stays; a group of zeros stays zero.
        square = (groups**2).sum(-1, keepdims=True)
        scale = np.divide(square, common, out=np.zeros_like(common), where=common > 0)
    else:
        scale = common / (levels**2).sum(-1, keepdims=True)
    best = levels * np.maximum(scale, np.float32(2**-24)).astype(np.float16).astype(np.float32)
    found = best.reshape(len(turned), size) @ rotation(size)
    return torch.from_numpy(found).view(vectors.shape)


def packed(key_bits: int, value_bits: int):
    """Return what gives keys and values back as a store of these bits does."""
    return lambda keys, values: (
        given_back(keys, key_bits),
        given_back(values, value_bits, values=True),
    )

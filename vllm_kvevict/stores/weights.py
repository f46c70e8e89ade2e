"""Checksum of a model's weights as they are in memory."""

from collections.abc import Iterator
from hashlib import sha256

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLES = 1024
"""Words of every parameter that the checksum contains as they are."""


@torch.inference_mode()
def weights_in_memory(model: torch.nn.Module) -> str:
    """Return a checksum of all parameters of a model on this rank.

    Two sums of each parameter's words and a sample of them are hashed. This reads all weights once
    on their device, and copies next to nothing to the host. It detects updates of weights; it is no
    protection against forged ones.
    """
    found = sha256()
    for name, parameter in model.named_parameters():
        for tensor in _plain(parameter):
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            flat = tensor.detach().contiguous().view(-1)
            if flat.storage_offset() * flat.itemsize % 4:
                flat = flat.clone()
            data = flat.view(torch.uint8)
            words = data[: data.numel() // 4 * 4].view(torch.int32)
            sample = words[:: max(1, words.numel() // SAMPLES)]
            sums = torch.stack([part.sum(dtype=torch.int64) for part in (words, words[::2])])
            for part in (sums, sample, data[words.numel() * 4 :]):
                found.update(part.cpu().numpy().tobytes())
    return found.hexdigest()


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors with the bytes of one that may be a wrapper, such as TorchAO's."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))

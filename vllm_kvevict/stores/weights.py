"""Checksum of a model's weights as they are in memory."""

from collections.abc import Iterator
from hashlib import sha256

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLES = 1024
"""Number of words of every parameter that the checksum contains unchanged."""


@torch.inference_mode()
def weights_in_memory(model: torch.nn.Module) -> str:
    """Return a checksum of all parameters of a model on this rank.

    The hash covers two sums of each parameter's words and a sample of them. All weights are read
    once on their device, and almost nothing is copied to the host. The checksum detects updates of
    weights; it does not protect against forged weights.
    """
    checksum = sha256()
    for name, parameter in model.named_parameters():
        for tensor in _plain(parameter):
            checksum.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            flat = tensor.detach().contiguous().view(-1)
            if flat.storage_offset() * flat.itemsize % 4:
                flat = flat.clone()
            data = flat.view(torch.uint8)
            words = data[: data.numel() // 4 * 4].view(torch.int32)
            sample = words[:: max(1, words.numel() // SAMPLES)]
            sums = torch.stack([part.sum(dtype=torch.int64) for part in (words, words[::2])])
            for part in (sums, sample, data[words.numel() * 4 :]):
                checksum.update(part.cpu().numpy().tobytes())
    return checksum.hexdigest()


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield tensors with the bytes of a tensor that may be a wrapper, such as TorchAO's."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))

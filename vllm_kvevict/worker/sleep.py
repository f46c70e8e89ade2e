"""Content of device memory that outlives sleep mode, which frees the memory."""

from collections.abc import Iterable

import torch


class HostCopies:
    """Copies on the host of tensors whose memory is freed, and later comes back at its addresses.

    Args:
        tensors: The tensors; those of one storage and offset are copied once.

    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = {(t.data_ptr(), t.shape, t.stride()): t for t in tensors}
        self._copies = [t.to("cpu", copy=True) for t in self._tensors.values()]

    def restore(self) -> None:
        """Write the content back."""
        for tensor, content in zip(self._tensors.values(), self._copies, strict=True):
            tensor.copy_(content)

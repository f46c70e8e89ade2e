"""Host memory of one rank that holds published stores, as the scheduler says."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from vllm_kvevict.schedule.step_plan import StoreCopy
from vllm_kvevict.stores.content import StoreContent
from vllm_kvevict.stores.files import StoreFiles, Tensors, unpack


class HostStores:
    """Carries out what plans say of stores outside the KV cache.

    On CUDA copies run on the step's own stream between its forward pass and the next, to and from
    pinned memory; no copy is waited for but by the thread that writes files.

    Args:
        content: Copies stores out of the KV cache and into it.
        files: Where they are written to as well, or None.
        rank: This one.
        timed: Times a copy into the KV cache from the tier that is named.

    """

    def __init__(
        self,
        content: StoreContent,
        files: StoreFiles | None,
        rank: int,
        timed: Callable[[str], AbstractContextManager[None]] = lambda tier: nullcontext(),
    ) -> None:
        self._timed = timed
        self._content = content
        self._files = files
        self._rank = rank
        self._kept: dict[str, Tensors] = {}

    def load(self, loads: Sequence[StoreCopy]) -> None:
        """Before the forward pass: bring back what requests of the step read."""
        for copy in loads:
            with self._timed("memory" if copy.payload is None else "file"):
                self._load(copy)

    def _load(self, copy: StoreCopy) -> None:
        tensors = self._kept.get(copy.name)
        if tensors is None:
            assert copy.payload is not None, f"store {copy.name} is nowhere"
            tensors = _pinned(unpack(copy.payload[self._rank]), self._content.device)
            if copy.keep:
                self._kept[copy.name] = tensors
        self._content.write(copy.groups, tensors)

    def save(self, forgotten: Sequence[str], saves: Sequence[StoreCopy]) -> None:
        """After the evictions: forget stores by name, and copy others out of the KV cache."""
        for name in forgotten:
            self._kept.pop(name, None)
        for copy in saves:
            tensors, ready = _on_host(self._content.read(copy.groups), self._content.device)
            if copy.keep:
                self._kept[copy.name] = tensors
            if copy.write and self._files is not None:
                self._files.write_soon(copy.name, self._rank, tensors, ready)

    def flush(self) -> None:
        """Wait until all files are written."""
        if self._files is not None:
            self._files.flush()


def _pinned(tensors: Tensors, device: torch.device) -> Tensors:
    return {n: t.pin_memory() for n, t in tensors.items()} if device.type == "cuda" else tensors


def _on_host(
    tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device
) -> tuple[Tensors, Callable[[], None]]:
    """The tensors in host memory, and what waits until they are there."""
    if device.type == "cpu":
        return dict(tensors), lambda: None
    host = {}
    for name, tensor in tensors:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host[name] = pinned.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event.synchronize

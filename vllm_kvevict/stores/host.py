"""Host memory of one rank that holds published stores, as the scheduler says."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from vllm.logger import init_logger

from vllm_kvevict.stores.content import StoreContent
from vllm_kvevict.stores.files import StoreFiles, Tensors, unpack
from vllm_kvevict.stores.region import open_region
from vllm_kvevict.timeline.step_plan import StoreCopy

logger = init_logger("vllm.kv_eviction.tiers")


@dataclass
class StoreNews:
    """What a worker reports to the scheduler about files of stores.

    Args:
        written: By name, whether a store was written.
        weighed: The number of the last reset after which the weights were checked.
        generation: What :meth:`StoreFiles.use` takes for these weights.

    """

    written: dict[str, bool] = field(default_factory=dict)
    weighed: int = 0
    generation: str = ""


class HostStores:
    """Carries out what plans say of stores outside the KV cache.

    On CUDA copies run on the step's own stream between its forward pass and the next, to and from
    pinned memory; no copy is waited for but by the thread that writes files. A store that comes
    from a file was read and checked by the scheduler's threads, and lies in memory that this rank
    maps. A rank on another host reads its file itself: that step then waits for the file system,
    and the engine ends with the error if the file was removed since it was checked.

    Args:
        content: Copies stores out of the KV cache and into it.
        files: Where they are written to as well, or None.
        rank: This one.
        timed: Times a copy into the KV cache from the tier that is named.
        checksum: Returns a checksum of the weights of all ranks; every rank calls it at once.

    """

    def __init__(
        self,
        content: StoreContent,
        files: StoreFiles | None,
        rank: int,
        timed: Callable[[str], AbstractContextManager[None]] = lambda tier: nullcontext(),
        checksum: Callable[[], str] = lambda: "",
    ) -> None:
        self._timed = timed
        self._content = content
        self._files = files
        self._rank = rank
        self._kept: dict[str, Tensors] = {}
        self._checksum = checksum
        self._first = checksum() if files is not None else ""
        self._weights_known = True
        self._news = StoreNews()

    def weights_change(self) -> None:
        """Write no more files until the weights are checked: those of the folder may differ."""
        self._weights_known = False

    def weigh(self, number: int) -> None:
        """Use files of the weights that are in memory now; the reset ``number`` asks for it."""
        if self._files is None:
            return
        found = self._checksum()
        self._news.generation = generation = "" if found == self._first else found
        self._news.weighed, self._weights_known = number, True
        self._files.use(generation)

    def news(self) -> StoreNews | None:
        """What happened since the last call; None for nothing."""
        if self._files is None:
            return None
        self._news.written |= self._files.results()
        if not (self._news.written or self._news.weighed):
            return None
        news, self._news = self._news, StoreNews()
        return news

    def load(self, loads: Sequence[StoreCopy]) -> None:
        """Before the forward pass: bring back what requests of the step read."""
        for copy in loads:
            with self._timed("memory" if copy.payload is None else "file"):
                self._load(copy)

    def _load(self, copy: StoreCopy) -> None:
        tensors = self._kept.get(copy.name)
        if tensors is None:
            tensors = self._from_file(copy)
            if copy.keep:
                tensors = self._kept[copy.name] = _own(tensors, self._content.device)
        self._content.write(copy.groups, tensors)

    def _from_file(self, copy: StoreCopy) -> Tensors:
        """The tensors of a store's file, which was checked.

        Raises:
            ValueError: This rank is on another host, and its file changed.
            OSError: This rank is on another host, and its file is gone.

        """
        assert copy.payload is not None and self._files is not None, f"store {copy.name} is nowhere"
        handle = copy.payload[self._rank]
        mapping = open_region(handle)
        if mapping is None:
            logger.warning_once(
                "KV eviction: rank %d is on another host than the scheduler, so its steps wait for "
                "the files of stores.",
                self._rank,
            )
            mapping = self._files.read(copy.name, self._rank, handle[2]).map()
        return unpack(mapping)

    def save(self, forgotten: Sequence[str], saves: Sequence[StoreCopy]) -> None:
        """After the evictions: forget stores by name, and copy others out of the KV cache."""
        for name in forgotten:
            self._kept.pop(name, None)
        for copy in saves:
            write = copy.write and self._weights_known
            if copy.write and not write:
                self._news.written[copy.name] = False
            if not (copy.keep or write):
                continue
            tensors, ready = _on_host(self._content.read(copy.groups), self._content.device)
            if copy.keep:
                self._kept[copy.name] = tensors
            if write and self._files is not None:
                self._files.write_soon(copy.name, self._rank, tensors, ready)

    def flush(self) -> None:
        """Wait until all files are written, but not for long."""
        if self._files is not None:
            self._files.flush()


def _own(tensors: Tensors, device: torch.device) -> Tensors:
    """Copies that outlive a mapping, pinned for CUDA."""
    return {n: t.pin_memory() if device.type == "cuda" else t.clone() for n, t in tensors.items()}


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

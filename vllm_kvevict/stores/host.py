"""Host memory of one rank for published stores, managed by the scheduler's plans."""

import errno
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from vllm.logger import init_logger

from vllm_kvevict.rules.step_plan import StoreCopy
from vllm_kvevict.stores.content import StoreContent
from vllm_kvevict.stores.files import StoreFiles, Tensors, unpack
from vllm_kvevict.stores.pinned import PinnedMemory
from vllm_kvevict.stores.region import open_region

logger = init_logger("vllm.kv_eviction.tiers")


@dataclass
class StoreNews:
    """A worker's report to the scheduler about files of stores.

    Args:
        written: Whether each store was written, by name.
        weighed: Number of the last reset after which the weights were checked.
        generation: Argument of :meth:`StoreFiles.use` for these weights.
        lost: Stores that a rank could not load in the step that reports them.
        full: True if the machine has no memory left, so that no more stores are kept.

    """

    written: dict[str, bool] = field(default_factory=dict)
    weighed: int = 0
    generation: str = ""
    lost: list[str] = field(default_factory=list)
    full: bool = False


class HostStores:
    """Executes the plans for stores outside the KV cache.

    On CUDA, copies run on the stream of the step between its forward pass and the next one, to and
    from pinned memory. Only the thread that writes files waits for a copy. A store from a file was
    read and checked by the scheduler's threads, and is in memory that this rank maps. A rank on
    another host reads its file itself; the step then waits for the file system. If a rank cannot
    load a store, because the file is gone or the process has no descriptor left, all ranks report
    it as lost, and the scheduler discards what was computed over it.

    Args:
        content: Copies stores out of the KV cache and into it.
        files: Files that stores are also written to, or None.
        rank: Number of this rank.
        timed: Returns a context that times a copy into the KV cache from the given tier.
        checksum: Returns a checksum of the weights of all ranks; every rank calls it at once.
        everywhere: Returns which of some conditions hold on all ranks; every rank calls it at once.

    """

    def __init__(
        self,
        content: StoreContent,
        files: StoreFiles | None,
        rank: int,
        timed: Callable[[str], AbstractContextManager[None]] = lambda tier: nullcontext(),
        checksum: Callable[[], str] = lambda: "",
        everywhere: Callable[[list[bool]], list[bool]] = lambda conditions: conditions,
    ) -> None:
        self._timed = timed
        self._everywhere = everywhere
        self._content = content
        self._files = files
        self._rank = rank
        self._kept: dict[str, Tensors] = {}
        self._pinned = PinnedMemory() if content.device.type == "cuda" else None
        self._checksum = checksum
        self._first = checksum() if files is not None else ""
        self._weights_known = True
        self._full = False
        self._news = StoreNews()

    def weights_change(self) -> None:
        """Stop writing files until the weights are checked, because they may differ from the
        folder's."""
        self._weights_known = False

    def weigh(self, number: int) -> None:
        """Use files of the weights that are in memory now, as requested by the reset ``number``."""
        if self._files is None:
            return
        checksum = self._checksum()
        self._news.generation = generation = "" if checksum == self._first else checksum
        self._news.weighed, self._weights_known = number, True
        self._files.use(generation)

    def news(self) -> StoreNews | None:
        """Return what happened since the last call; None if nothing did."""
        if self._files is not None:
            self._news.written |= self._files.results()
        if self._news == StoreNews():
            return None
        news, self._news = self._news, StoreNews()
        return news

    def load(self, loads: Sequence[StoreCopy]) -> None:
        """Before the forward pass, restore the stores that requests of the step read."""
        loaded = []
        for copy in loads:
            with self._timed("memory" if copy.payload is None else "file"):
                loaded.append(self._load(copy))
        if not loads:
            return
        for copy, whole in zip(loads, self._everywhere(loaded), strict=True):
            if not whole:
                self._kept.pop(copy.name, None)
                self._news.lost.append(copy.name)

    def _load(self, copy: StoreCopy) -> bool:
        """Restore a store; return False if its content cannot be reached."""
        tensors = self._kept.get(copy.name)
        if tensors is None:
            try:
                tensors = self._from_file(copy)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                logger.warning_once(
                    "KV eviction: rank %d cannot load a store (%s); its requests compute their "
                    "prompts. This is logged once for each reason.",
                    self._rank,
                    reason,
                )
                return False
            if copy.keep and not self._full:
                try:
                    tensors = self._kept[copy.name] = _own(tensors, self._pinned)
                except (RuntimeError, MemoryError) as error:
                    self._no_room(error)
        self._content.write(copy.groups, tensors)
        return True

    def _from_file(self, copy: StoreCopy) -> Tensors:
        """Return the tensors of a store's file, which was already checked.

        Raises:
            ValueError: The file changed.
            OSError: This rank cannot map the content, and cannot read the file either.

        """
        if copy.payload is None or self._files is None:
            # An earlier load failed, there was no memory for the store, or the server slept, and
            # the scheduler did not know it yet.
            raise FileNotFoundError(errno.ENOENT, "it is not in memory")
        handle = copy.payload[self._rank]
        mapping = open_region(handle)
        if mapping is None:
            logger.warning_once(
                "KV eviction: rank %d cannot map memory of the scheduler, for instance because "
                "they run on different hosts, so the rank's steps wait for files of stores.",
                self._rank,
            )
            mapping = self._files.read(copy.name, self._rank, handle[2]).map()
        return unpack(mapping)

    def clear(self) -> None:
        """Free the memory of all stores, for a server that sleeps."""
        self._kept.clear()
        if self._pinned is not None:
            self._pinned.clear()

    def _no_room(self, error: Exception) -> None:
        self._full = self._news.full = True
        logger.warning(
            "KV eviction: rank %d has no memory for another store (%s), so the server keeps no "
            "more of them until it is restarted; lower --kv-eviction-store-memory.",
            self._rank,
            str(error).partition("\n")[0],
        )

    def save(self, forgotten: Sequence[str], saves: Sequence[StoreCopy]) -> None:
        """After the evictions, remove stores by name, and copy others out of the KV cache.

        If the machine has no memory for a copy, no more stores are kept.
        """
        for name in forgotten:
            self._kept.pop(name, None)
        for copy in saves:
            write = copy.write and self._weights_known
            if copy.write and not write:
                self._news.written[copy.name] = False
            keep = copy.keep and not self._full
            if not (keep or write):
                continue
            try:
                tensors, ready = _on_host(self._content.read(copy.groups), self._pinned)
            except (RuntimeError, MemoryError) as error:
                self._no_room(error)
                if write:
                    self._news.written[copy.name] = False
                continue
            if keep:
                self._kept[copy.name] = tensors
            if write and self._files is not None:
                self._files.write_soon(copy.name, self._rank, tensors, ready)
        if self._pinned is not None:
            self._pinned.trim()

    def flush(self) -> None:
        """Wait until all files are written, for a limited time."""
        if self._files is not None:
            self._files.flush()


def _own(tensors: Tensors, pinned: PinnedMemory | None) -> Tensors:
    """Return copies that outlive a mapping, in pinned memory if there is any."""
    if pinned is None:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    copies = {}
    for name, tensor in tensors.items():
        copies[name] = pinned.empty(tensor.shape, tensor.dtype)
        copies[name].copy_(tensor)
    return copies


def _on_host(
    tensors: Iterable[tuple[str, torch.Tensor]], pinned: PinnedMemory | None
) -> tuple[Tensors, Callable[[], None]]:
    """Return the tensors in host memory, and a function that waits until they are complete."""
    if pinned is None:
        return dict(tensors), lambda: None
    host = {}
    for name, tensor in tensors:
        host[name] = pinned.empty(tensor.shape, tensor.dtype)
        host[name].copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event.synchronize

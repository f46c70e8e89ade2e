"""vLLM's allocator of sleep mode on a CPU: tagged memory that is freed, restored or lost.

It follows ``CuMemAllocator`` (``vllm/device_allocator/cumem.py``), which needs the CUDA driver.
Memory that is freed keeps its address, may not be read or written, and comes back with other
content unless it was copied to the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.device_allocator import DEFERRABLE_TAGS

LOST = 77
"""Each byte of memory that comes back without its content. Numbers of floats are finite then."""


def memory_of(*values: Any) -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors in nested values, by identity."""
    tensors = [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
    return {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}


class _Noting(TorchDispatchMode):
    """Notes what operations allocate."""

    def __init__(self, allocator: "Allocator") -> None:
        super().__init__()
        self._allocator = allocator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = memory_of(args, kwargs)
        new = {at: one for at, one in memory_of(found).items() if at not in given}
        self._allocator.note(new)
        return found


class _Watching(TorchDispatchMode):
    """Raises where an operation touches memory that was freed."""

    def __init__(self, allocator: "Allocator") -> None:
        super().__init__()
        self._allocator = allocator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        touched = self._allocator.asleep & memory_of(args, kwargs).keys()
        if touched and not func.is_view:
            raise RuntimeError(f"{func} reads or writes memory that is not mapped")
        return func(*args, **(kwargs or {}))


class Allocator:
    """Memory by tag; the innermost :meth:`use_memory_pool` counts."""

    def __init__(self) -> None:
        self.tags: dict[int, str] = {}
        self.asleep: set[int] = set()
        # Held, as another one may not get its address.
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._tag: str | None = None
        self._watching = _Watching(self)
        self._watches = False

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        outer, self._tag = self._tag, tag
        try:
            if outer is None:
                with _Noting(self):
                    yield
            else:
                yield
        finally:
            self._tag = outer

    def note(self, memory: dict[int, torch.UntypedStorage]) -> None:
        """Count memory as allocated under the tag in use."""
        assert self._tag is not None
        self._memory |= memory
        self.tags |= dict.fromkeys(memory, self._tag)

    def tag(self, tensor: torch.Tensor) -> str | None:
        """The tag under which the memory of a tensor was allocated."""
        return self.tags.get(tensor.untyped_storage()._cdata)

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for at, memory in self._memory.items():
            if at not in self.asleep:
                if self.tags[at] in offload_tags:
                    self._copies[at] = memory.clone()
                self._free(at)

    def discard(self, tags: tuple[str, ...]) -> None:
        for at in self._memory:
            if at not in self.asleep and self.tags[at] in tags:
                self._free(at)

    def wake_up(self, tags: list[str] | None = None) -> None:
        for at in list(self.asleep):
            tag = self.tags[at]
            if tags is None or tag in tags or tag not in DEFERRABLE_TAGS:
                self.asleep.remove(at)
                if at in self._copies:
                    self._memory[at].copy_(self._copies.pop(at))
        self._watch()

    def _free(self, at: int) -> None:
        memory = self._memory[at]
        if memory.device.type == "cpu" and memory.nbytes():
            torch.empty(0, dtype=torch.uint8).set_(memory).fill_(LOST)
        self.asleep.add(at)
        self._watch()

    def _watch(self) -> None:
        """Watch as long as anything is asleep."""
        if bool(self.asleep) != self._watches:
            self._watches = bool(self.asleep)
            if self._watches:
                self._watching.__enter__()
            else:
                self._watching.__exit__(None, None, None)

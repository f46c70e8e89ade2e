"""A GPU that is not there: CPU tensors that say they are on ``cuda:0``, and a watch over waits.

Kernels run on the CPU, so results are real. What is watched are the host's calls: each that would
make it wait for a CUDA device is named. The rules are those of torch's CUDA code, version 2.13.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA = torch.device("cuda", 0)
READS = (
    "item tolist numpy __bool__ __int__ __float__ __index__ nonzero unique masked_select equal"
).split()
HIDDEN = ("aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select", "aten::_unique2")
"""What waits inside other operations, as aten names it."""


class OnDevice(torch.Tensor):
    """A CPU tensor that counts as one of the device."""


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's numbers as a tensor of the pretended device."""
    return tensor.as_subclass(OnDevice)


class Watch(TorchFunctionMode):
    """Serves tensors of ``cuda:0`` and lists what the host waited for in ``waits``."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.launches = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._property(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        mine = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        if name == "is_pinned":
            return getattr(args[0], "pinned", False)
        if name in ("to", "cpu", "cuda"):
            return self._moved(name, args, kwargs)
        if name == "copy_":
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            self._copied(args[0], args[1], blocking)
            return self._run(func, args, kwargs, [args[0]] if _is_mine(args[0]) else [])
        pinned, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
            self._foreign(name, tensors, mine)
            return on_device(func(*args, **kwargs))
        if name in ("__setitem__", "__getitem__") and _is_mine(args[0]):
            self._indexed(name, *args)
        elif mine and name in READS:
            self.waits.append(f"{name} of a CUDA tensor")
        elif mine:
            self._foreign(name, tensors, mine)
        result = self._run(func, args, kwargs, mine)
        if pinned:
            result.pinned = True
        return result

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any, mine: list[Any]) -> Any:
        plain = tree_map_only(OnDevice, lambda t: t.as_subclass(torch.Tensor), (args, kwargs))
        if not mine:
            return func(*plain[0], **plain[1])
        self.launches += 1
        with _Hidden(self.waits):
            result = func(*plain[0], **plain[1])
        return tree_map_only(torch.Tensor, on_device, result)

    def _property(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _is_mine(args[0]):
            return func(*args, **kwargs)
        known = {"device": CUDA, "is_cuda": True, "is_cpu": False}
        name = func.__self__.__name__
        if name in known:
            return known[name]
        value = func(args[0].as_subclass(torch.Tensor))
        return on_device(value) if isinstance(value, torch.Tensor) else value

    def _moved(self, name: str, args: Any, kwargs: Any) -> Any:
        tensor, mine = args[0], _is_mine(args[0])
        blocking = not kwargs.pop("non_blocking", False)
        devices = [part for part in args[1:] if isinstance(part, str | torch.device)]
        devices += [kwargs.pop("device")] if kwargs.get("device") is not None else []
        rest = [part for part in args[1:] if not isinstance(part, str | torch.device)]
        target = torch.device(devices[0]).type if devices else name if name != "to" else None
        plain = tensor.as_subclass(torch.Tensor)
        moved = plain.to(*rest, **kwargs) if rest or kwargs else plain.clone()
        wanted = mine if target is None else target == "cuda"
        if wanted != mine:
            self._copied(on_device(moved) if wanted else moved, tensor, blocking)
        return on_device(moved) if wanted else moved

    def _copied(self, target: Any, source: Any, blocking: bool) -> None:
        if _is_mine(target) == _is_mine(source):
            return
        host = source if _is_mine(target) else target
        to_device = _is_mine(target)
        if blocking:
            self.waits.append("a blocking copy between host and device")
        elif to_device and not getattr(host, "pinned", False):
            self.waits.append("a copy from pageable memory")

    def _indexed(self, name: str, tensor: torch.Tensor, index: Any, value: Any = None) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        by_tensor = False
        for part in parts:
            if isinstance(part, torch.Tensor | list):
                by_tensor = True
                if not _is_mine(part):
                    self.waits.append("an index that lies on the host")
                elif part.dtype in (torch.bool, torch.uint8):
                    self.waits.append("a boolean index")
        if name == "__getitem__":
            return
        if isinstance(value, torch.Tensor):
            if not _is_mine(value):
                self.waits.append("assignment of a host tensor")
        elif by_tensor or tensor.as_subclass(torch.Tensor)[index].dim() == 0:
            # The number becomes a CPU tensor, which is copied from pageable memory.
            self.waits.append("assignment of a number")

    def _foreign(self, name: str, tensors: Iterable[Any], mine: Iterable[Any]) -> None:
        """Operations take tensors of one device; a CPU scalar is read on the host."""
        for tensor in tensors:
            if not _is_mine(tensor) and tensor.dim() > 0:
                raise RuntimeError(f"{name} of tensors on cuda:0 and cpu")


class _Hidden(TorchDispatchMode):
    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        boolean = name == "aten::index" and any(
            part is not None and part.dtype == torch.bool for part in args[1]
        )
        kwargs = kwargs or {}
        repeats = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
        if name in HIDDEN or boolean or repeats:
            self._waits.append(f"{name} inside another operation")
        return func(*args, **kwargs)


def _is_mine(value: object) -> bool:
    return isinstance(value, OnDevice)


class _Event:
    """Of a stream that is always done."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return 1.0


@contextmanager
def pretended(monkeypatch: Any) -> Iterator[Watch]:
    """``cuda:0`` exists, pinned memory and events too."""
    from vllm.utils import torch_utils

    monkeypatch.setattr(torch_utils, "is_pin_memory_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    with Watch() as watch:
        yield watch

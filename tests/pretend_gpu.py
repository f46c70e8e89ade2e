"""A GPU that is not there: CPU tensors that say they are on ``cuda:0``, and a watch over waits.

Kernels run on the CPU, so results are real. What is watched are the host's calls: each that would
make it wait for a CUDA device is named. The rules are those of torch's CUDA code, version 2.13.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from vllm.utils import torch_utils

from tests.pretend_memory import Memory
from tests.pretend_operations import Hidden
from tests.pretend_stream import Stream
from vllm_kvevict.ops import token_format

CUDA = torch.device("cuda", 0)
READS = (
    "item tolist numpy __array__ __bool__ __int__ __float__ __complex__ __index__ __repr__ __str__"
).split()
MAKERS = ("tensor", "as_tensor", "asarray")
"""What copies its data to the device that is named, and waits."""
MOVERS = ("where", "index_put", "index_put_", "_index_put_impl_")
"""What moves host tensors among its arguments to the device."""
VALUES = {"masked_fill": 2, "index_fill": 3}
"""Arguments that are numbers: what lies on the device is read."""


def _upload_of_a_gpu() -> Any:
    """vLLM's ``async_tensor_h2d``: its CPU runner, once imported, leaves another in its place."""
    source, found = Path(torch_utils.__file__).read_text(), dict[str, Any]()
    defined = [one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)]
    mine = [one for one in defined if one.name == "async_tensor_h2d"]
    exec(compile(ast.Module(mine, []), torch_utils.__file__, "exec"), vars(torch_utils), found)
    return found["async_tensor_h2d"]


async_tensor_h2d = _upload_of_a_gpu()


def upload_as_on_a_gpu(monkeypatch: Any) -> None:
    """Give every module that has imported the upload that of a GPU."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("vllm.", "vllm_kvevict.")) and "async_tensor_h2d" in vars(module):
            monkeypatch.setattr(module, "async_tensor_h2d", async_tensor_h2d)


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
        self.stream = Stream(self.waits)
        self.memory = Memory()
        # Held, as an address may not be used again for memory that is not pinned.
        self._pinned: dict[int, torch.UntypedStorage] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._property(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        mine = [tensor for tensor in tensors if _is_mine(tensor)]
        if name == "is_pinned":
            return self._is_pinned(args[0])
        if name == "pin_memory":
            return self._pin(args[0].clone())
        if name in ("to", "cpu", "cuda"):
            return self._moved(name, args, kwargs)
        if name == "copy_":
            return self._copy(func, *args, **kwargs)
        pinned, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        cuda = bool(mine) if device is None else torch.device(device).type == "cuda"
        if cuda or mine:
            self._called(func, name, args, kwargs, tensors)
        if name in MAKERS or name == "new_tensor":
            self._data(cuda, args[-1] if args else kwargs["data"])
        if device is not None:
            kwargs["device"] = "cpu"
        result = self._run(func, args, kwargs, bool(mine), cuda)
        return self._pin(result) if pinned else result

    def _called(
        self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> None:
        """Name what a call waits for by its arguments."""
        host = [tensor for tensor in tensors if not _is_mine(tensor)]
        if name in ("__setitem__", "__getitem__") and _is_mine(args[0]):
            self._indexed(name, *args)
        elif name in READS and not host:
            self.waits.append(f"{name} of a CUDA tensor")
        elif name in MAKERS or name.endswith("_like"):
            return
        elif host:
            self._foreign(func, name, args, kwargs, host)
        place = VALUES.get(name.rstrip("_"), len(args))
        if any(_is_mine(value) for value in (*args[place:], kwargs.get("value"))):
            self.waits.append(f"{name} by a number that lies on the device")

    def _foreign(
        self, func: Any, name: str, args: Any, kwargs: Any, host: list[torch.Tensor]
    ) -> None:
        """Operations take tensors of one device; a CPU scalar is read on the host."""
        kernel = isinstance(func, OpOverload | OpOverloadPacket) and "aten" not in str(func)
        changes = (name[-1:] == "_" and name[-2:] != "__") or name.startswith("__i")
        targets = [args[0] if args and changes else None, kwargs.get("out")]
        if name in MOVERS:
            self.waits.append(f"an upload by {name}")
        elif kernel or any(tensor.dim() for tensor in host):
            raise RuntimeError(f"{name} of tensors on cuda:0 and cpu")
        elif any(isinstance(one, torch.Tensor) and not _is_mine(one) for one in targets):
            self.waits.append(f"{name} of a CUDA tensor into one of the host")

    def _data(self, cuda: bool, data: Any) -> None:
        """What a tensor is made of is copied where it lies elsewhere; numbers one by one."""
        if isinstance(data, torch.Tensor):
            if _is_mine(data) != cuda:
                self.waits.append("a blocking upload" if cuda else "a blocking download")
        elif cuda or any(_is_mine(leaf) for leaf in tree_leaves(data)):
            self.waits.append("an upload of numbers" if cuda else "a download of numbers")

    def _run(
        self, func: Callable[..., Any], args: Any, kwargs: Any, reads: bool, cuda: bool
    ) -> Any:
        """The call on plain tensors; ``reads`` the device, and makes tensors there if ``cuda``."""
        plain = tree_map_only(OnDevice, _plain, (args, kwargs))
        if not reads:
            result = func(*plain[0], **plain[1])
        else:
            self.launches += 1
            with Hidden(self.waits, self.memory):
                result = func(*plain[0], **plain[1])
        if cuda:
            self.memory.follow(getattr(func, "__name__", ""), result, plain)
        return tree_map_only(torch.Tensor, on_device, result) if cuda else result

    def _property(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _is_mine(args[0]):
            return func(*args, **kwargs)
        known = {"device": CUDA, "is_cuda": True, "is_cpu": False}
        name = func.__self__.__name__
        if name in known:
            return known[name]
        value = func(_plain(args[0]))
        return on_device(value) if isinstance(value, torch.Tensor) else value

    def _moved(self, name: str, args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        kwargs.pop("copy", None)
        if name == "to":
            like = rest[0] if rest else kwargs.get("other")
            if isinstance(like, torch.Tensor):
                kwargs.pop("other", None)
                rest = [CUDA if _is_mine(like) else like.device, like.dtype, *rest[1:]]
            device, dtype, late, form = torch._C._nn._parse_to(*rest, **kwargs)
        else:
            late = kwargs.get("non_blocking", name == "cuda" and len(rest) > 1 and rest[1])
            device, dtype, form = torch.device(name), None, kwargs.get("memory_format")
        wanted = _is_mine(tensor) if device is None else device.type == "cuda"
        moved = _plain(tensor).to(
            dtype=dtype, copy=True, memory_format=form or torch.preserve_format
        )
        if wanted and not _is_mine(tensor):
            self._upload(tensor, tensor.shape, not late)
        elif not wanted and _is_mine(tensor):
            # Torch makes the host's memory, and pins it where nobody waits.
            self._download(self._pin(moved) if late else moved, moved, not late)
        if wanted:
            self.memory.follow(name, moved)
        return on_device(moved) if wanted else moved

    def _copy(self, func: Any, target: Any, src: Any, non_blocking: bool = False) -> Any:
        if _is_mine(target) == _is_mine(src):
            return self._run(func, (target, src), {}, _is_mine(target), _is_mine(target))
        if _is_mine(target):
            self._upload(src, target.shape, not non_blocking)
            func(_plain(target), src)
        else:
            self._download(target, _plain(src).expand_as(target), not non_blocking)
        return target

    def _upload(self, host: torch.Tensor, shape: torch.Size, blocking: bool) -> None:
        if not host.numel():
            return
        if blocking:
            self.waits.append("a blocking upload")
        elif not (self._is_pinned(host) and host.is_contiguous() and host.shape == shape):
            # Torch repeats or gathers the elements in memory of its own.
            self.waits.append("an upload from pageable memory")

    def _download(self, host: torch.Tensor, source: torch.Tensor, blocking: bool) -> None:
        if blocking:
            self.waits.append("a blocking download")
        elif not (self._is_pinned(host) and host.is_contiguous()):
            self.waits.append("a download into pageable memory")
        if not blocking:
            self.stream.download(host, source)
        elif host is not source:
            host.copy_(source)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return not _is_mine(tensor) and tensor.untyped_storage().data_ptr() in self._pinned

    def _indexed(self, name: str, tensor: torch.Tensor, index: Any, value: Any = None) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        by_tensor = False
        for part in parts:
            if part is None or part is ... or isinstance(part, slice | Number):
                continue
            tensor_part = isinstance(part, torch.Tensor)
            boolean = tensor_part and part.dtype in (torch.bool, torch.uint8)
            if tensor_part and part.dim() == 0 and not boolean:
                continue  # the number of a place, read
            by_tensor = True
            if not _is_mine(part):
                self.waits.append("an upload of an index")
            elif boolean:
                self.waits.append("a boolean index")
        if name == "__getitem__" or _is_mine(value):
            return
        number = isinstance(value, Number) or (isinstance(value, torch.Tensor) and not value.dim())
        if not number:
            self.waits.append("an upload by assignment")
        elif by_tensor or _plain(tensor)[tree_map_only(OnDevice, _plain, index)].dim() == 0:
            # The number becomes a CPU tensor, which is copied from pageable memory.
            self.waits.append("an upload of a number by assignment")


def _is_mine(value: object) -> bool:
    return isinstance(value, OnDevice)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


@contextmanager
def pretended(monkeypatch: Any) -> Iterator[Watch]:
    """``cuda:0`` exists, pinned memory and events too."""
    with Watch() as watch:
        upload_as_on_a_gpu(monkeypatch)
        monkeypatch.setattr(torch_utils, "is_pin_memory_available", lambda: True)
        # vLLM 0.33 looks once, as the module is loaded.
        monkeypatch.setattr(torch_utils, "PIN_MEMORY", True, raising=False)
        monkeypatch.setattr(torch.cuda, "Event", watch.stream.event)
        monkeypatch.setattr(torch.cuda, "MemPool", object)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: watch.stream)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", watch.memory.use)
        monkeypatch.setattr(torch.cuda, "synchronize", watch.stream.synchronize)
        monkeypatch.setattr(torch.accelerator, "synchronize", watch.stream.synchronize)
        # What is kept for a device is not kept for a real one.
        monkeypatch.setattr(token_format, "_rotations", {})
        yield watch

"""A captured graph on a CPU: a list of calls with fixed addresses, which a replay makes again.

Triton launches and FlashAttention are entries of their own, all else are torch's operations. As in
a CUDA graph a replay runs no Python of ours, writes where the capture wrote, and reading the
device while capturing is an error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from vllm.v1.attention.backends import flash_attn

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Graph(TorchDispatchMode):
    """Calls made inside :meth:`capturing`, in order; ``refused`` names what none may be."""

    def __init__(self, refused: Sequence[str] = READS) -> None:
        super().__init__()
        self.refused = refused
        self.calls: list[Callable[[], None]] = []
        self.launches: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name().split(".")[0] in self.refused:
            raise RuntimeError(f"{func.name()} while capturing")
        result = func(*args, **kwargs)
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        outputs = tensors(result)
        fresh = [t.untyped_storage().data_ptr() not in given for t in outputs]

        def again() -> None:
            for old, new, own in zip(outputs, tensors(func(*args, **kwargs)), fresh, strict=True):
                if own:
                    old.copy_(new)

        self.calls.append(again)
        return result

    def _launch(self, name: str, call: Callable[[], Any]) -> Any:
        with _disable_current_modes():
            result = call()

        def again() -> None:
            for old, new in zip(tensors(result), tensors(call()), strict=True):
                if old is not new:
                    old.copy_(new)

        self.launches.append(name)
        self.calls.append(again)
        return result

    @contextmanager
    def capturing(self, monkeypatch: Any) -> Iterator[None]:
        run, attend = InterpretedFunction.run, flash_attn.flash_attn_varlen_func
        with monkeypatch.context() as patched, self:
            patched.setattr(
                InterpretedFunction,
                "run",
                lambda kernel, *args, **kwargs: self._launch(
                    kernel.fn.__name__, lambda: run(kernel, *args, **kwargs)
                ),
            )
            patched.setattr(
                flash_attn,
                "flash_attn_varlen_func",
                lambda **kwargs: self._launch("flash_attn", lambda: attend(**kwargs)),
            )
            yield

    def replay(self) -> None:
        for call in self.calls:
            call()

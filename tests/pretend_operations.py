"""Operations of a pretended device whose CUDA code makes the host wait, inside other calls too."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretend_memory import Memory

WAITING = ("aten::isin", "aten::histc", "aten::multinomial")
TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""What torch says of operations whose result's size or number the host must know."""


class Hidden(TorchDispatchMode):
    """Names what waits inside other operations, and follows the memory of their results."""

    def __init__(self, waits: list[str], memory: Memory) -> None:
        super().__init__()
        self._waits = waits
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().split(".")[0]
        if "index" in name and len(args) > 1 and isinstance(args[1], list | tuple):
            kinds = [part.dtype for part in args[1] if part is not None]
            waits = torch.bool in kinds or torch.uint8 in kinds
        elif name == "aten::repeat_interleave":
            waits = kwargs.get("output_size") is None
        else:
            solves = name.startswith(("aten::linalg_", "aten::_linalg_"))
            waits = (solves and not name.endswith(("_norm", "_ex"))) or name in WAITING
            waits = waits or not TAGS.isdisjoint(func.tags)
        if waits:
            self._waits.append(f"{name} inside another operation")
        result = func(*args, **kwargs)
        self._memory.follow(name, result, (args, kwargs))
        return result

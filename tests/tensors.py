"""All tensors of an object, whatever its attributes are called."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def tensors_of(*objects: Any, but: type | tuple[type, ...] = ()) -> Iterator[torch.Tensor]:
    """Yield each tensor once that attributes, items and their attributes reach.

    Args:
        objects: Where to begin. Attributes count if the class is one of this package.
        but: Classes of objects that are left out.

    """
    seen, waiting = dict[int, Any](), list[Any](objects)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (str, bytes, type, *_types(but))):
            continue
        # Held, as another one may not get its address.
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        elif type(one).__module__.startswith("vllm_kvevict.") and hasattr(one, "__dict__"):
            waiting += vars(one).values()


def _types(classes: type | Iterable[type]) -> tuple[type, ...]:
    return (classes,) if isinstance(classes, type) else tuple(classes)

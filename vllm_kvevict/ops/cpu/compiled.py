"""How functions are compiled: without the interpreter's lock, and kept on disk."""

from typing import Any

import numba
from llvmlite.binding import ffi

_symbol = ffi._lib_wrapper.__getattr__


def _no_symbol_is_special(library: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _symbol(library, name)


# llvmlite answers for every name with a function. vLLM looks for __dict__ in all that modules hold
# when another engine starts in this process (triton_utils/dispatcher.py), and would end with it.
ffi._lib_wrapper.__getattr__ = _no_symbol_is_special

OPTIONS: dict[str, Any] = dict(nogil=True, cache=True, error_model="numpy")
SUMS = {"contract", "arcp", "nsz", "reassoc"}
"""Freedom to add in another order, which vector instructions need."""

exact = numba.njit(**OPTIONS)
fast = numba.njit(fastmath=SUMS, **OPTIONS)
finite = numba.njit(fastmath=SUMS | {"nnan"}, **OPTIONS)
"""For functions that see no NaN."""
